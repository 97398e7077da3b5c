//! Benches of Castor. `LOG.md` keeps what they printed; `gpu/` holds the scripts for machines with GPUs.
