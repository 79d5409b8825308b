//! **guest-shim**: a network interface in a guest's namespace, in front of the venet driver.
//!
//! | question | module |
//! |---|---|
//! | what happens from connect to disconnect, and again? | [`agent`] |
//! | how does it get into the guest's namespace, and what does the interface look like? | [`guest_interface`] |
//! | how does it wait for the bus? | [`vector_wait`] |
//! | what does `guest-shim status` show? | [`status`] |

// What a peer wrote passes through nearly every module, so these hold in all of them.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

pub mod agent;
pub mod guest_interface;
pub mod status;
pub mod vector_wait;
