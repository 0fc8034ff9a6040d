"""What the recipes share. Nothing here owns a training loop."""
