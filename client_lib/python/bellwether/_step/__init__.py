"""From one optimizer step to the next: when it ends, what its frame holds, its price."""
