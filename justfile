# What CI runs.
ci:
    .ci/run

# The README's test command.
test:
    cargo test --workspace

# Trains the small Llama of the README on two ranks.
quickstart:
    cargo run --release -- run --nproc_per_node 2 train --config configs/quickstart.toml
