//! What lies in a slot, and the slot as memory that Python can look at.

use pp_contract::{DType, Manifest, TensorSpec};
use pp_transport::host::Mapping;
use pyo3::exceptions::{PyAttributeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::refused;
use crate::medium::Place;

/// The type with this name.
pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    let known = DType::ALL.iter().find(|known| known.to_string() == name);
    known
        .copied()
        .ok_or_else(|| PyValueError::new_err(format!("there is no type {name}")))
}

/// The tensors of a payload: their names, types, shapes and places. Equal layouts of a job are one object.
#[pyclass(frozen, module = "pp_pipeline._native")]
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) manifest: Manifest,
    /// `(name, type, shape, offset, bytes)` of each.
    #[pyo3(get)]
    tensors: Py<PyTuple>,
}

impl Layout {
    pub(crate) fn of(py: Python<'_>, manifest: Manifest) -> PyResult<Self> {
        let rows: PyResult<Vec<_>> = manifest
            .iter()
            .map(|(offset, spec)| {
                let shape = PyTuple::new(py, spec.shape().dims())?;
                let dtype = spec.dtype().to_string();
                (spec.name(), dtype, shape, offset, spec.bytes()).into_pyobject(py)
            })
            .collect();
        let tensors = PyTuple::new(py, rows?)?.unbind();
        Ok(Self { manifest, tensors })
    }
}

#[pymethods]
impl Layout {
    #[new]
    fn new(py: Python<'_>, tensors: Vec<(String, String, Vec<u64>)>) -> PyResult<Self> {
        let specs: PyResult<Vec<TensorSpec>> = tensors
            .iter()
            .map(|(name, dtype, shape)| {
                TensorSpec::new(name, self::dtype(dtype)?, shape).map_err(|e| refused(&e))
            })
            .collect();
        let manifest = Manifest::new(&specs?).map_err(|e| refused(&e))?;
        Self::of(py, manifest)
    }

    /// The bytes of a slot that holds them.
    #[getter]
    fn payload_bytes(&self) -> u64 {
        self.manifest.payload_bytes()
    }
}

/// Layouts that came, so that equal ones are one object.
#[derive(Debug, Default)]
pub(crate) struct Layouts(Vec<Py<Layout>>);

impl Layouts {
    /// As many shapes as a job may have before the ones that came first are made again.
    const MOST: usize = 64;

    pub(crate) fn get(&mut self, py: Python<'_>, manifest: &Manifest) -> PyResult<Py<Layout>> {
        let known = self
            .0
            .iter()
            .find(|known| known.get().manifest == *manifest);
        if let Some(known) = known {
            return Ok(known.clone_ref(py));
        }
        if self.0.len() == Self::MOST {
            self.0.clear();
        }
        let new = Py::new(py, Layout::of(py, manifest.clone())?)?;
        self.0.push(new.clone_ref(py));
        Ok(new)
    }
}

/// Memory that a slot lies in. It stays mapped as long as anything in Python refers to it.
#[pyclass(frozen, module = "pp_pipeline._native")]
#[derive(Debug)]
pub(crate) struct Memory {
    address: usize,
    bytes: usize,
    owner: Option<Mapping>,
}

#[pymethods]
impl Memory {
    /// A part of the slot, for one tensor.
    #[pyo3(signature = (offset, bytes, shape, typestr))]
    fn window(
        &self,
        offset: usize,
        bytes: usize,
        shape: Py<PyTuple>,
        typestr: String,
    ) -> PyResult<Window> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes);
        if end.is_none() {
            let has = self.bytes;
            return Err(PyValueError::new_err(format!(
                "{bytes} bytes at {offset} are outside of a slot of {has}"
            )));
        }
        Ok(Window {
            address: self.address + offset,
            shape,
            typestr,
            _owner: self.owner.clone(),
            on_gpu: self.owner.is_none(),
        })
    }

    /// The bytes of the slot.
    #[getter]
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A part of a slot as an array, in the terms of NumPy's array interface.
#[pyclass(frozen, module = "pp_pipeline._native")]
#[derive(Debug)]
pub(crate) struct Window {
    address: usize,
    shape: Py<PyTuple>,
    typestr: String,
    on_gpu: bool,
    _owner: Option<Mapping>,
}

#[pymethods]
impl Window {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.interface(py, !self.on_gpu)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.interface(py, self.on_gpu)
    }
}

impl Window {
    fn interface<'py>(&self, py: Python<'py>, is_here: bool) -> PyResult<Bound<'py, PyDict>> {
        if !is_here {
            return Err(PyAttributeError::new_err(
                "the slot lies in another kind of memory",
            ));
        }
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("data", (self.address, false))?;
        dict.set_item("shape", &self.shape)?;
        dict.set_item("typestr", &self.typestr)?;
        Ok(dict)
    }
}

/// The slots of one end of an edge, as Python knows them: one object each.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    mapping: Option<Mapping>,
    known: Vec<Py<Memory>>,
}

impl Slots {
    /// The slot at this place. What belongs to the host memory of an earlier generation is forgotten.
    pub(crate) fn get(&mut self, py: Python<'_>, place: Place) -> PyResult<Py<Memory>> {
        let Place {
            address,
            bytes,
            mapping,
        } = place;
        let owner = match (mapping, &self.mapping) {
            (Some(mapping), Some(known)) if known.is_of(&mapping) => Some(mapping),
            (Some(mapping), _) => {
                self.known.clear();
                Some(self.mapping.insert(mapping).clone())
            }
            (None, _) => None,
        };
        let is_it =
            |known: &&Py<Memory>| known.get().address == address && known.get().bytes >= bytes;
        if let Some(known) = self.known.iter().find(is_it) {
            return Ok(known.clone_ref(py));
        }
        self.known.retain(|known| known.get().address != address);
        let memory = Py::new(
            py,
            Memory {
                address,
                bytes,
                owner,
            },
        )?;
        self.known.push(memory.clone_ref(py));
        Ok(memory)
    }
}
