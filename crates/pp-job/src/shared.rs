//! GPUs that several ranks share.

use std::fmt;

use pp_contract::Rank;
use serde::Serialize;

/// A GPU that several ranks share.
#[derive(Clone, Debug, Serialize)]
pub struct SharedDevice {
    /// Its UUID.
    pub device: String,
    /// The ranks.
    pub ranks: Vec<Rank>,
    /// Whether NVIDIA's MPS lets their work overlap. Otherwise the GPU serves them in turns.
    pub is_under_mps: bool,
}

/// On one line, for the start of a job.
impl fmt::Display for SharedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.ranks.iter().map(Rank::to_string).collect();
        write!(f, "ranks {} share {}", ranks.join(", "), self.device)?;
        f.write_str(match self.is_under_mps {
            true => " under MPS",
            false => {
                ", which serves them in turns; NVIDIA's MPS lets their work overlap: nvidia-cuda-mps-control -d"
            }
        })
    }
}
