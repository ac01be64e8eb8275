//! The parts of a package that are the share of a session, one after the other, in host memory or on a stream.

use std::mem;
use std::path::Path;
use std::time::Duration;

use pp_device::{Device, Stream};
use pp_kernels::denoise::cuda::Gpu;
use pp_kernels::{
    DType, Failure, Payload, PayloadMut, SessionConfig, Space, TensorSpec, pass_range,
};

use crate::film::{Film, GUIDE};
use crate::model::{self, Model};
use crate::package::{Package, Sizes, Tensor};
use crate::torch::{Place, Tensor as Memory, Torch};

/// How long the end of a session may wait for its stream.
const PATIENCE: Duration = Duration::from_secs(2);

/// The parts of a session.
pub(crate) struct Parts {
    pub(crate) film: Film,
    /// The file, for messages.
    path: String,
    place: Place,
    threads: u32,
    /// Of a device.
    stream: Option<Stream>,
    models: Vec<Model>,
    /// The address of what each model but the last makes.
    between: Vec<u64>,
    /// What work on the stream may use beside the models.
    memory: Vec<Memory>,
    /// The guide that the first model gets.
    guide: Option<Tensor>,
    /// Says whether its last part is that of the package.
    ends: bool,
}

impl Parts {
    /// Opens the share of a session, and computes its example.
    ///
    /// # Errors
    /// The package does not fit the session, this machine or this PyTorch, or is damaged.
    pub(crate) fn open(path: &Path, film: Film, config: &SessionConfig) -> Result<Parts, Failure> {
        let package = Package::open(path)?;
        let about = package.about()?;
        let (stream, place, capability) = match config.space {
            Space::Host => (None, Place::Host, [0; 2]),
            Space::Cuda { context, stream } => {
                // SAFETY: the caller of the C table promises both handles for the life of the session.
                let stream = unsafe { Stream::borrow(&Device::of_context(context)?, stream) };
                let device = stream.device().about();
                let capability = [device.compute_major, device.compute_minor];
                let place = Place::Cuda(device.ordinal);
                (Some(stream), place, capability)
            }
        };
        let path_text = path.display().to_string();
        model::check(path, &about, place, capability)?;
        film.check(&path_text, &about, config)?;
        let count = about.parts.len();
        let share = pass_range(count as u32, config.part as usize, config.parts as usize);
        let (first, end) = (share.start as usize, share.end as usize);
        let raw = stream.as_ref().map_or(0, Stream::raw);
        let most = film.most(about.example);
        let mut parts = Parts {
            film,
            path: path_text,
            place,
            threads: config.threads,
            stream,
            models: Vec::new(),
            between: Vec::new(),
            memory: Vec::new(),
            guide: (first > 0).then(|| about.parts[first - 1].output.clone()),
            ends: end == count,
        };
        for number in first..end {
            let part = (about.parts[number].clone(), [about.example, most]);
            let model = Model::open((path, &package), number, part, (place, raw))?;
            parts.models.push(model);
            if number + 1 < end {
                let made = about.parts[number].output.spec(most)?;
                let address = parts.allocate((made.dtype(), made.shape().dims()))?;
                parts.between.push(address);
            }
        }
        Ok(parts)
    }

    /// Memory for a tensor, which is freed with the session; gives its address.
    ///
    /// # Errors
    /// There is none left.
    pub(crate) fn allocate(&mut self, shape: (DType, &[u64])) -> Result<u64, Failure> {
        let made = Torch::get()?.empty(shape, self.place)?;
        let address = made.address()?;
        self.memory.push(made);
        Ok(address)
    }

    /// The guide that the first part gets, if it gets one.
    pub(crate) fn guide(&self) -> Option<&Tensor> {
        self.guide.as_ref()
    }

    /// Says whether the last part is that of the package, and whether the first one is, too.
    pub(crate) fn are_whole(&self) -> (bool, bool) {
        (self.ends, self.ends && self.guide.is_none())
    }

    /// What the last part makes in a chunk of these sizes.
    ///
    /// # Errors
    /// A part takes other tensors.
    pub(crate) fn made(&self, sizes: Sizes) -> Result<Option<TensorSpec>, Failure> {
        for model in &self.models {
            self.film.check_part(&self.path, &model.part, sizes)?;
        }
        let last = self.models.last();
        last.map(|model| model.part.output.spec(sizes)).transpose()
    }

    /// Copies a tensor from one payload into that of another name in the other.
    pub(crate) fn copy(
        &self,
        input: &Payload<'_>,
        spec: &TensorSpec,
        output: &mut PayloadMut<'_>,
        to: &str,
    ) -> Result<(), Failure> {
        let (dtype, dims) = (spec.dtype(), spec.shape().dims());
        let Some(stream) = &self.stream else {
            let from = input.tensor(spec.name(), dtype, dims)?;
            output.tensor_mut(to, dtype, dims)?.copy_from_slice(from);
            return Ok(());
        };
        let from = input.device_tensor(spec.name(), dtype, dims)?;
        let to = output.device_tensor(to, dtype, dims)?;
        // SAFETY: two tensors of so many bytes in payloads of this call, which the host or this session keeps until the stream has
        // passed it.
        unsafe { Gpu::copy(stream, from, to, spec.bytes() as usize) }
    }

    /// Runs the parts, on tensors by their names.
    ///
    /// # Errors
    /// A tensor is missing or another one; PyTorch fails.
    pub(crate) fn compute(
        &mut self,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        sizes: Sizes,
    ) -> Result<(), Failure> {
        let is_on_device = self.stream.is_some();
        let raw = self.stream.as_ref().map_or(0, Stream::raw);
        if !is_on_device {
            Torch::get()?.use_threads(self.threads);
        }
        let last = self.models.len() - 1;
        let mut addresses = Vec::new();
        for (at, model) in self.models.iter_mut().enumerate() {
            addresses.clear();
            let specs = model.specs(sizes)?;
            let (made, taken) = specs
                .split_last()
                .ok_or_else(|| Failure::error("a part without tensors"))?;
            for spec in taken {
                let (name, dtype, dims) = (spec.name(), spec.dtype(), spec.shape().dims());
                addresses.push(match is_on_device {
                    _ if name == GUIDE && at > 0 => self.between[at - 1],
                    true => input.device_tensor(name, dtype, dims)?,
                    false => input
                        .tensor(name, dtype, dims)?
                        .as_ptr()
                        .expose_provenance() as u64,
                });
            }
            let (name, dtype, dims) = (made.name(), made.dtype(), made.shape().dims());
            addresses.push(match is_on_device {
                _ if at < last => self.between[at],
                true => output.device_tensor(name, dtype, dims)?,
                false => output
                    .tensor_mut(name, dtype, dims)?
                    .as_mut_ptr()
                    .expose_provenance() as u64,
            });
            // SAFETY: tensors of these types and shapes, of payloads that the host keeps until the stream has passed the call,
            // and memory of this session, which is freed behind the stream. Only the last is written.
            unsafe { model.run(&addresses, sizes, raw) }?;
        }
        Ok(())
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        let is_idle = |stream: &Stream| stream.wait_until_idle(PATIENCE).is_ok();
        if !self.stream.as_ref().is_none_or(is_idle) {
            // A stream that hangs may still use them.
            mem::forget((mem::take(&mut self.models), mem::take(&mut self.memory)));
        }
    }
}
