"""A run shown elsewhere while it trains: TensorBoard, trackio, wandb."""
