//! When the pump notifies the other side.

use core::fmt;
use core::str::FromStr;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// When the pump notifies. Which one is in use changes nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Ask not to be woken while draining, ask again when empty; notify only a side that asked. What virtio does with
    /// `VIRTIO_F_EVENT_IDX`.
    #[default]
    EventIndex,
    /// Notify for every frame, whether the other side sleeps or not. The floor that every other policy must beat.
    Immediate,
}

impl Policy {
    /// Whether each frame is announced by itself.
    pub fn announces_each_frame(self) -> bool {
        self == Policy::Immediate
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Policy::EventIndex => "event-index",
            Policy::Immediate => "immediate",
        })
    }
}

/// A name that is no policy.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("unknown policy {0:?}: expected event-index or immediate")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;
    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        match text {
            "event-index" => Ok(Policy::EventIndex),
            "immediate" => Ok(Policy::Immediate),
            _ => Err(UnknownPolicy(text.into())),
        }
    }
}
