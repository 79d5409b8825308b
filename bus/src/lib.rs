//! **vbus**: a paravirtual bus in shared memory.
//!
//! A host offers devices on a bus; a guest drives them. Between them lies one window of memory that the host owns. The
//! *north* half ([`north`]) is a driver's view, the *south* half ([`south`]) a device's; each is usable without the
//! other. The bus knows nothing of any device: an interface type gives records and calls their meaning.
//!
//! | question | module |
//! |---|---|
//! | what lies where in the window? | [`abi`], [`layout`], [`window`] |
//! | how do records move, and who wakes whom? | [`ring`] |
//! | which control calls are there? | [`message`] |
//! | how does a host serve them? | [`south`] |
//! | how does a guest make them? | [`north`] |
//! | how do both find each other? | [`connector`] |
//! | what survives a restart of the host process? | [`private_state`] |

// What a peer wrote passes through nearly every module, so these hold in all of them.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

pub mod abi;
pub mod connector;
pub mod layout;
pub mod message;
pub mod north;
pub mod private_state;
pub mod ring;
pub mod south;
pub mod window;
