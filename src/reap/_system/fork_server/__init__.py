"""The fork server, which has torch imported and forks children; the parent's end of it; and what a child runs."""
