"""What happens to gradients: they are averaged over ranks, gathered, scaled and clipped."""
