"""nanorl: reinforcement learning for language models, one concept a file. Imports nothing, so that --help is instant."""
