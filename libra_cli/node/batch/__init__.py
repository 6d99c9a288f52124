"""What a step trains on: its samples, the shares of gradient workers, and log ratios as bytes."""
