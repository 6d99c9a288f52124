"""What is taken for progress, and how long each thing that is waited for may take."""
