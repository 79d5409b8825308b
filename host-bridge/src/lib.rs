//! **host-bridge**: offers devices on a Linux bridge to guests.
//!
//! Two processes: the *supervisor* keeps CAP_NET_ADMIN, makes TAPs, and owns sockets, windows and vectors; the *data
//! process* gets descriptors, has no capability, and moves frames.
//!
//! | question | module |
//! |---|---|
//! | what can be configured? | [`config`] |
//! | who accepts guests, and what happens when one goes? | [`supervisor`] |
//! | who moves frames? | [`data_process`] |
//! | who starts and ends that process? | `data_process_handle` |
//! | what do both say to each other? | [`channel`] |
//! | how does a TAP come to be a port of the bridge? | [`tap_port`] |
//! | what would swallow traffic silently? | [`warnings`] |
//! | what may the data process do? | [`privileges`] |
//! | how are sockets made? | [`listener`] |
//! | what does `host-bridge status` show? | [`status`] |

// What a peer wrote passes through nearly every module, so these hold in all of them.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

pub mod channel;
pub mod config;
pub mod data_process;
mod data_process_handle;
pub mod listener;
pub mod privileges;
pub mod status;
pub mod supervisor;
pub mod tap_port;
pub mod warnings;
