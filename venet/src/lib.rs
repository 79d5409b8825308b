//! **venet**: an Ethernet device for vbus.
//!
//! | question | module |
//! |---|---|
//! | what do driver and device say to each other? | [`abi`] |
//! | which frames pass, and what is checked? | [`frame`], [`offload`] |
//! | who decides whether to wake the other side, and when to sleep? | [`pump`], [`pump::policy`] |
//! | how much may be on its way to the other side? | [`pump::back_pressure`] |
//! | where do frames go? | [`port`] |
//! | how do rings look to the pump? | [`queue`] |
//! | the host's end | [`device`] |
//! | the guest's end | [`driver`] |
//! | what is counted? | [`counters`] |

// What a peer wrote passes through nearly every module, so these hold in all of them.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

pub mod abi;
pub mod counters;
pub mod device;
pub mod driver;
pub mod frame;
pub mod offload;
pub mod port;
pub mod pump;
pub mod queue;
