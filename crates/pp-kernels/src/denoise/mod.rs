//! The built-in filter: a streaming video denoiser without learned weights, on the CPU and on CUDA devices.
//!
//! Encode cuts frames into 8×8 patch tokens in bf16 and estimates the noise, `phase_b` runs `num_denoise_steps` passes
//! of windowed patch attention over the chunk and the frames before it, decode puts the patches back. Zero steps is
//! the identity, bit for bit. [`mod@reference`] says the formula; [`settings`] holds its numbers.
//!
//! The tensors: `latents_in` and `latents_out` bf16 `[frames, tokens, 64]`, f16 where samples have 10 bits (on the CPU alone); `conditioning_embeds` bf16 `[planes]`, the
//! noise's standard deviation; `denoising_step_list` i64 `[steps]`, the strength of each pass in thousandths;
//! `context_frames` as `latents_in`, exactly with recompute. Where the passes are cut into parts, a `guide`
//! `[frames, tokens, 64]` goes from each to the next beside the inputs ([`mod@passes`]). The members of a group share each
//! frame by rows (`rows.rs`).

pub mod cpu;
pub mod cuda;
pub mod geometry;
pub(crate) mod messages;
pub mod passes;
pub mod reference;
pub(crate) mod rows;
pub mod settings;
pub(crate) mod tensors;
