"""The Python layer: data loading, garbage collection, exceptions."""
