//! Kernels opened for a run, as its arguments ask for them.

use std::fs::File;
use std::io::Read as _;

use anyhow::Context as _;
use pp_command::KernelChoice;
use pp_contract::{Digest, FaultKind};
use pp_job::Error;
use pp_kernels::{Description, KernelSet, guard};
use pp_runtime::stage::{StageError, StageResult};
use pp_video::buffer::{Buffer, FrameMemory};
use pp_video::header::Header;

/// Memory of the kernels' choice for so many chunks.
pub(super) fn buffers(
    count: usize,
    memory: impl Fn() -> StageResult<Option<Box<dyn FrameMemory>>>,
) -> StageResult<Vec<Buffer>> {
    let make = |_| Ok(memory()?.map_or_else(Buffer::default, Buffer::from));
    (0..count).map(make).collect()
}

/// Bytes of a slot for a payload: behind it lies the guard that catches kernels which write on.
pub(super) fn slot_bytes(payload: u64) -> u64 {
    payload + guard::GUARD_BYTES as u64
}

/// Refuses a clip of more bits a sample than the kernels of a stage take.
pub(super) fn check_bits(stage: &str, about: &Description, header: &Header) -> StageResult<()> {
    let (has, takes) = (header.bits(), about.bits);
    if has <= takes {
        return Ok(());
    }
    let on_cpus = KernelSet::named(&about.name).is_some_and(|set| set.describe() == about);
    let detail = format!(
        "the clip has {} bits a sample, and the kernels '{}' of {stage} take {}; make one of {2}: ffmpeg -i IN -pix_fmt {} \
         OUT.y4m{}",
        has as u32,
        about.name,
        takes as u32,
        takes.ffmpeg_name(header.chroma()),
        if on_cpus {
            ", or run on CPUs with --transport host"
        } else {
            ""
        }
    );
    Err(StageError::new(FaultKind::BadInput, "open kernels", detail))
}

/// What tells one set of kernels, weights included, from another: what they say of themselves and, of a plugin, its file.
pub(super) fn digest_of_kernels(kernels: &KernelChoice, about: &Description) -> Result<u64, Error> {
    let KernelChoice::File(path) = kernels else {
        return Ok(about.digest);
    };
    let mut state = Digest::new();
    state.update(&about.digest.to_le_bytes());
    let mut piece = vec![0; 1 << 20];
    let read = File::open(path).and_then(|mut file| {
        loop {
            match file.read(&mut piece)? {
                0 => return Ok(()),
                bytes => state.update(&piece[..bytes]),
            }
        }
    });
    read.with_context(|| format!("cannot read {} again", path.display()))?;
    Ok(state.finish())
}
