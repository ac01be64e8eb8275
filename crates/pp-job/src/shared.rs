//! GPUs that several ranks share.

use std::fmt;

use pp_contract::Rank;
use serde::Serialize;

/// A GPU that several ranks share.
#[derive(Clone, Debug, Serialize)]
pub struct SharedDevice {
    /// The UUID of the GPU, as `nvidia-smi -L` prints it.
    pub device: String,
    /// The ranks on it, two or more, in ascending order.
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
                ", which serves them in turns; to let their work overlap, start NVIDIA's MPS: nvidia-cuda-mps-control -d"
            }
        })
    }
}
