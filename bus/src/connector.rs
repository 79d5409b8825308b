//! Connectors: how a bus reaches a guest.

pub mod local;
pub mod notifier;
