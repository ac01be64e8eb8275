//! What a plan's parts are made of: names and types of their fields, in order, as text.
//!
//! *Hazard.* Two builds whose plans differ in a field but not in name and version read each other's bytes as something
//! else: bodies name no fields.
//! *Choices.* The text is found by reading the parts from a source that gives zeros and writes down what it is asked for;
//! so no person has to keep it up to date. It ends where zeros are refused.

use core::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, SeqAccess, Visitor};

use super::Plan;
use crate::digest::digest;

/// Digest of the fields of a plan: ranks whose plans are not the same type differ in it.
#[must_use]
pub fn plan_digest<P: Plan>() -> u64 {
    digest(fields_of::<P::Parts>().as_bytes())
}

fn fields_of<T: serde::de::DeserializeOwned>() -> String {
    let mut text = String::new();
    // What refuses a zero ends the text, on every rank in the same place.
    let _ = T::deserialize(Zeros(&mut text));
    text
}

/// Gives zeros, and notes what they are asked for as.
struct Zeros<'a>(&'a mut String);

/// The end of what can be found.
#[derive(Debug, thiserror::Error)]
#[error("no more can be found")]
struct End;

impl de::Error for End {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self
    }
}

/// So many items, by name or by place.
struct Items<'a> {
    text: &'a mut String,
    names: Option<&'static [&'static str]>,
    given: usize,
    count: usize,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = End;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, End> {
        if self.given == self.count {
            return Ok(None);
        }
        if let Some(names) = self.names {
            self.text.push_str(names[self.given]);
            self.text.push(' ');
        }
        self.given += 1;
        seed.deserialize(Zeros(self.text)).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.count - self.given)
    }
}

impl Zeros<'_> {
    fn items<'de, V: Visitor<'de>>(
        self,
        names: Option<&'static [&'static str]>,
        count: usize,
        visitor: V,
    ) -> Result<V::Value, End> {
        self.0.push('(');
        let text = &mut *self.0;
        let value = visitor.visit_seq(Items {
            text,
            names,
            given: 0,
            count,
        })?;
        self.0.push_str("),");
        Ok(value)
    }
}

macro_rules! zeros {
    ($($method:ident $name:literal $visit:ident $($zero:expr)?;)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, End> {
            self.0.push_str(concat!($name, ","));
            visitor.$visit($($zero)?)
        })*
    };
}

impl<'de> Deserializer<'de> for Zeros<'_> {
    type Error = End;

    zeros! {
        deserialize_bool "bool" visit_bool false;
        deserialize_i8 "i8" visit_i8 0;
        deserialize_i16 "i16" visit_i16 0;
        deserialize_i32 "i32" visit_i32 0;
        deserialize_i64 "i64" visit_i64 0;
        deserialize_i128 "i128" visit_i128 0;
        deserialize_u8 "u8" visit_u8 0;
        deserialize_u16 "u16" visit_u16 0;
        deserialize_u32 "u32" visit_u32 0;
        deserialize_u64 "u64" visit_u64 0;
        deserialize_u128 "u128" visit_u128 0;
        deserialize_f32 "f32" visit_f32 0.0;
        deserialize_f64 "f64" visit_f64 0.0;
        deserialize_char "char" visit_char ' ';
        deserialize_str "text" visit_borrowed_str "";
        deserialize_string "text" visit_borrowed_str "";
        deserialize_bytes "bytes" visit_bytes b"";
        deserialize_byte_buf "bytes" visit_bytes b"";
        deserialize_unit "unit" visit_unit;
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, End> {
        Err(End)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, End> {
        self.0.push_str("option ");
        visitor.visit_some(self)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, End> {
        self.deserialize_unit(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, End> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, End> {
        self.0.push_str("list ");
        self.items(None, 1, visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, count: usize, visitor: V) -> Result<V::Value, End> {
        self.items(None, count, visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        count: usize,
        visitor: V,
    ) -> Result<V::Value, End> {
        self.items(None, count, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, _: V) -> Result<V::Value, End> {
        self.0.push_str("map");
        Err(End)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, End> {
        // All names first: what comes behind a field that refuses a zero is known by its name at least.
        self.0.push_str(&names.join("+"));
        self.items(Some(names), names.len(), visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, End> {
        self.0.push_str(&names.join("|"));
        Err(End)
    }

    serde::forward_to_deserialize_any! { identifier ignored_any }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::{List, Text, VideoPlan, VideoPlanParts};

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only its type is looked at")]
    struct Parts {
        a: u32,
        b: Option<i64>,
        c: List<(u8, bool), 4>,
        d: Text<8>,
        e: Inner,
        f: f32,
    }

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only its type is looked at")]
    struct Inner {
        x: [u16; 2],
    }

    #[test]
    fn fields_are_found_with_names_and_types() {
        let expected = "a+b+c+d+e+f(a u32,b option i64,c list ((u8,bool,),),d text,\
                        e x(x (u16,u16,),),f f32,),";
        assert_eq!(fields_of::<Parts>(), expected);
        let video = fields_of::<VideoPlanParts>();
        assert!(
            video.contains("noise_scale f32,skipped_frames u32,context_skipped (u32,u32,"),
            "{video}"
        );
    }

    #[test]
    fn digest_differs_with_any_change_of_a_field() {
        macro_rules! fields {
            ($($name:ident $kind:ty),*) => {{
                #[derive(Deserialize)]
                #[expect(dead_code, reason = "only its type is looked at")]
                struct Changed { $($name: $kind),* }
                fields_of::<Changed>()
            }};
        }
        let texts = [
            fields!(a u32, b f32),
            fields!(b f32, a u32),
            fields!(a u64, b f32),
            fields!(a u32, c f32),
            fields!(a u32),
            fields!(a u32, b Option<f32>),
        ];
        for (index, text) in texts.iter().enumerate() {
            assert!(!texts[..index].contains(text), "{text}");
        }
    }

    #[test]
    fn digest_of_the_video_plan_stays_while_its_version_does() {
        assert_eq!(plan_digest::<VideoPlan>(), 0xf653_dbfc_849b_8f07);
    }
}
