"""What is asked of a server: its page over HTTP, and a server of one's own."""
