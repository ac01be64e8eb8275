//! The tensors of the built-in kernels, on any device: which there are, and what a call must find in them.

use pp_contract::{DType, Manifest, TensorSpec, VideoPlanParts};

use super::geometry::{Geometry, TOKEN};
use super::passes::Share;
use super::settings::CONTEXT_FRAMES;
use crate::config::{Bits, ChunkShape, Layout, SessionConfig};
use crate::error::Failure;
use crate::stage::StageKind;

/// The type of the tokens of frames, which holds every sample of so many bits, as a multiple of a step of 8 bits.
pub(crate) fn latents(bits: Bits) -> DType {
    match bits {
        Bits::Eight => DType::Bf16,
        Bits::Ten => DType::F16,
    }
}

/// The types of what goes from part to part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Types {
    pub(crate) latents: DType,
    pub(crate) guide: DType,
}

/// Shape of the tokens of so many frames.
pub(crate) fn latents_dims(geometry: &Geometry, frames: u32) -> [u64; 3] {
    [frames.into(), geometry.tokens as u64, TOKEN as u64]
}

/// What a part hands on to the next one as it got it; the last of them exactly with recompute.
pub(crate) const HANDED_ON: [&str; 4] = [
    "latents_in",
    "conditioning_embeds",
    "denoising_step_list",
    "context_frames",
];

/// What a part gets, and but for the guide, where there is one, what every part hands on.
pub(crate) fn between(
    geometry: &Geometry,
    shape: ChunkShape,
    types: Types,
    has_guide: bool,
) -> Result<Manifest, Failure> {
    let tokens = |name, dtype, frames| {
        let dims = latents_dims(geometry, frames);
        TensorSpec::new(name, dtype, &dims)
    };
    let planes = geometry.planes.len() as u64;
    let mut tensors = vec![
        tokens("latents_in", types.latents, shape.frames)?,
        TensorSpec::new("conditioning_embeds", DType::Bf16, &[planes])?,
        TensorSpec::new("denoising_step_list", DType::I64, &[shape.steps.into()])?,
    ];
    if shape.context_frames > 0 {
        tensors.push(tokens(
            "context_frames",
            types.latents,
            shape.context_frames,
        )?);
    }
    if has_guide {
        tensors.push(tokens("guide", types.guide, shape.frames)?);
    }
    Ok(Manifest::new(&tensors)?)
}

/// What the passes of a share leave: its name and type.
pub(crate) fn result(share: &Share, types: Types) -> (&'static str, DType) {
    match share.ends() {
        true => ("latents_out", types.latents),
        false => ("guide", types.guide),
    }
}

/// The tensors that a stage gets and gives in this lap; `guide` is the type of a guide's samples.
pub(crate) fn layout(
    (kind, config, geometry): (StageKind, &SessionConfig, &Geometry),
    shape: ChunkShape,
    lap: u32,
    guide: DType,
) -> Result<Layout, Failure> {
    if shape.context_frames as usize > CONTEXT_FRAMES {
        return Err(Failure::invalid(format!(
            "{} context frames, these kernels look at {CONTEXT_FRAMES}",
            shape.context_frames
        )));
    }
    let types = Types {
        latents: latents(config.bits),
        guide,
    };
    let made = || -> Result<Manifest, Failure> {
        let dims = latents_dims(geometry, shape.frames);
        let latents = TensorSpec::new("latents_out", types.latents, &dims)?;
        Ok(Manifest::new(&[latents])?)
    };
    let (inputs, outputs) = match kind {
        StageKind::Source => (Manifest::empty(), between(geometry, shape, types, false)?),
        StageKind::Middle => {
            let share = Share::of(config, shape.steps, lap)?;
            let outputs = match share.ends() {
                true => made(),
                false => between(geometry, shape, types, true),
            };
            let inputs = between(geometry, shape, types, share.has_guide())?;
            (inputs, outputs?)
        }
        StageKind::Sink => (made()?, Manifest::empty()),
    };
    Ok(Layout { inputs, outputs })
}

/// Frames in `latents_in`, which must be within what the session takes.
pub(crate) fn frame_count(spec: Option<&TensorSpec>, max_frames: u32) -> Result<u32, Failure> {
    let frames = spec
        .and_then(|spec| spec.shape().dims().first().copied())
        .unwrap_or(0);
    match u32::try_from(frames) {
        Ok(frames) if frames > 0 && frames <= max_frames => Ok(frames),
        _ => Err(Failure::invalid(format!(
            "latents_in holds {frames} frames, this session takes 1 to {max_frames}"
        ))),
    }
}

/// Frames in `context_frames`, which must be there exactly when the plan says so.
pub(crate) fn context_count(
    plan: &VideoPlanParts,
    spec: Option<&TensorSpec>,
) -> Result<u32, Failure> {
    match (plan.do_kv_recompute, spec) {
        (false, None) => Ok(0),
        (true, Some(spec)) => match spec.shape().dims() {
            [frames, ..] if *frames > 0 => Ok(u32::try_from(*frames).unwrap_or(u32::MAX)),
            _ => Err(Failure::invalid("context_frames holds no frame")),
        },
        (true, None) => Err(Failure::invalid(
            "the plan asks for a recompute, but context_frames is missing",
        )),
        (false, Some(_)) => Err(Failure::invalid(
            "context_frames is there, but the plan asks for no recompute",
        )),
    }
}

/// Refuses context frames in front of the stream's first one, more of them than are looked at, and a chunk whose frame
/// numbers overflow. Gives the numbers of the context frames, the newest last.
pub(crate) fn check_place(
    plan: &VideoPlanParts,
    frames: u32,
    context: u32,
) -> Result<[u64; CONTEXT_FRAMES], Failure> {
    let mut numbers = [0; CONTEXT_FRAMES];
    let places = numbers.iter_mut().rev().zip(plan.frames_before());
    let places = places.take(context as usize);
    let placed = places.map(|(place, number)| *place = number).count();
    if placed < context as usize {
        return Err(Failure::invalid(format!(
            "{context} context frames in front of frame {}, at most {CONTEXT_FRAMES}",
            plan.current_start_frame
        )));
    }
    if plan
        .current_start_frame
        .checked_add(frames.into())
        .is_none()
    {
        return Err(Failure::invalid("frame numbers overflow"));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_frames_have_the_numbers_that_the_plan_tells_of() {
        let place = |start, skipped_frames, between, frames, context| {
            let mut plan = VideoPlanParts::first(16, 16, 1);
            plan.current_start_frame = start;
            (plan.skipped_frames, plan.context_skipped[0]) = (skipped_frames, between);
            check_place(&plan, frames, context).map_err(|why| why.to_string())
        };
        assert_eq!(place(40, 0, 0, 1, 2), Ok([38, 39]));
        assert_eq!(place(40, 3, 5, 1, 2), Ok([30, 36]));
        assert_eq!(place(9, 3, 5, 1, 1), Ok([0, 5]));
        assert_eq!(place(1, 0, 0, 1, 1), Ok([0, 0]));
        for (start, context) in [(9, 2), (4, 2), (40, 3)] {
            let error = place(start, 3, 5, 1, context).unwrap_err();
            let words = format!("{context} context frames in front of frame {start}, at most 2");
            assert!(error.contains(&words), "{error}");
        }
        assert!(place(u64::MAX, 0, 0, 1, 0).is_err());
    }
}
