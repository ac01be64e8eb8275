//! The device of a rank, as a user names it. Whether a machine has it is for the rank to find out.

use core::fmt;
use core::str::FromStr;

/// Names the device of a rank in PyTorch's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceName {
    /// `cpu`: host memory.
    Cpu,
    /// `cuda:N`: GPU N of those that the process sees, from 0. Several ranks may name one GPU and share it.
    Cuda(u32),
    /// `cuda`: the n-th rank of a host that says so takes its n-th visible GPU.
    NextCuda,
}

/// A text that names no device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a device is cpu, cuda or cuda:N, where N is the number of a visible GPU from 0")]
pub struct DeviceNameError;

impl DeviceName {
    /// Says whether it is a GPU.
    #[must_use]
    pub const fn is_gpu(self) -> bool {
        !matches!(self, Self::Cpu)
    }
}

impl DeviceName {
    /// The devices of several ranks, as [`str::split`] at commas reads them.
    #[must_use]
    pub fn list(devices: &[Self]) -> String {
        let names: Vec<String> = devices.iter().map(ToString::to_string).collect();
        names.join(",")
    }
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    fn from_str(text: &str) -> Result<Self, DeviceNameError> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::NextCuda),
            _ => {
                let number = text.strip_prefix("cuda:").ok_or(DeviceNameError)?;
                // `parse` takes a sign, too.
                let is_number = number.bytes().all(|digit| digit.is_ascii_digit());
                let number = number.parse().ok().filter(|_| is_number);
                number.map(Self::Cuda).ok_or(DeviceNameError)
            }
        }
    }
}

/// As it is read.
impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
            Self::NextCuda => f.write_str("cuda"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_the_names_of_pytorch() {
        for (text, device) in [
            ("cpu", DeviceName::Cpu),
            ("cuda", DeviceName::NextCuda),
            ("cuda:0", DeviceName::Cuda(0)),
            ("cuda:15", DeviceName::Cuda(15)),
        ] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string(), text);
        }
        for text in [
            "",
            "gpu",
            "CPU",
            "cuda:",
            "cuda:+1",
            "cuda:-1",
            "cuda:x",
            "cuda:99999999999",
        ] {
            assert_eq!(text.parse::<DeviceName>(), Err(DeviceNameError), "{text}");
        }
    }
}
