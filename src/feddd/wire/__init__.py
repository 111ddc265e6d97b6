"""What travels between server and clients: stages, chains of them, downloads, and the bytes of it all."""
