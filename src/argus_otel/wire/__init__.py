"""What both halves agree on: identities, packed layouts, names of span classes. numpy, no more."""
