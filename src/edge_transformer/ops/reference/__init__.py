"""The oracle: a numpy fp32 version of every op, written for reading. Its speed does not matter; its clarity does."""
