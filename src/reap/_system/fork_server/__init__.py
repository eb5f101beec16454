"""The fork server, which has torch imported and forks children; its parent's end of it; and the life of a child."""
