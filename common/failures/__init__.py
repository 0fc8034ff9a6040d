"""What an error means, how a run ended, and the sentences that tell a user."""
