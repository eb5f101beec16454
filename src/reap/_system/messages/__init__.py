"""Messages between processes: framed bytes on a socket, pickled factories and arguments, and exceptions that travel."""
