"""What the server asks of a training job: checked, agreed on, applied, answered."""
