"""What daemon and clients must agree on: messages, schemas, layouts. No I/O, no trio, no mlx."""
