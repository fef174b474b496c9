"""What models' names mean, and other providers behind the gateway."""
