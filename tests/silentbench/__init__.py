"""SilentBench: real precision bugs, planted in real megatron-core, and what the tool says of them."""
