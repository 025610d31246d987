//! Owning wrappers over libibverbs.
