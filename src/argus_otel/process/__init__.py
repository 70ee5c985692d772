"""One process of a job: what it is called, what runs in it, and how it ends."""
