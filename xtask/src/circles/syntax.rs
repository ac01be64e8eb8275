//! What the search for circles reads of Rust's syntax.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::{Meta, Token};

/// The tokens without the items, statements and fields that no ordinary build compiles.
pub(super) fn without_tests(tokens: TokenStream) -> TokenStream {
    let is = |token: Option<&TokenTree>, sign| matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == sign);
    let mut kept = Vec::new();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        if is(Some(&token), '#')
            && matches!(tokens.peek(), Some(TokenTree::Group(group)) if is_left_out(group.stream()))
        {
            // The attributes before it, doc comments among them.
            while let [.., sign, TokenTree::Group(_)] = &kept[..]
                && is(Some(sign), '#')
            {
                kept.truncate(kept.len() - 2);
            }
            // The rest of what the attribute stands before: up to its braces, or a `;` or `,` behind it.
            let (mut angles, mut is_arrow) = (0, false);
            let is_end = |token: &TokenTree| match token {
                TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                TokenTree::Punct(punct) => {
                    match punct.as_char() {
                        '<' => angles += 1,
                        '>' if !is_arrow => angles -= 1,
                        _ => {}
                    }
                    is_arrow = ['-', '='].contains(&punct.as_char());
                    punct.as_char() == ';' || punct.as_char() == ',' && angles == 0
                }
                _ => false,
            };
            if tokens.find(is_end).is_some() {
                tokens.next_if(|token| is(Some(token), ';'));
            }
            continue;
        }
        kept.push(match token {
            TokenTree::Group(group) => {
                let mut inner =
                    proc_macro2::Group::new(group.delimiter(), without_tests(group.stream()));
                inner.set_span(group.span());
                inner.into()
            }
            token => token,
        });
    }
    kept.into_iter().collect()
}

/// Says whether these tokens are a `cfg` that holds for tests or loom only.
fn is_left_out(attribute: TokenStream) -> bool {
    match syn::parse2::<Meta>(attribute) {
        Ok(Meta::List(list)) if list.path.is_ident("cfg") => list
            .parse_args::<Meta>()
            .is_ok_and(|condition| is_for_tests(&condition)),
        _ => false,
    }
}

fn is_for_tests(condition: &Meta) -> bool {
    let Meta::List(list) = condition else {
        return condition.path().is_ident("test") || condition.path().is_ident("loom");
    };
    let parser = syn::punctuated::Punctuated::<Meta, Token![,]>::parse_terminated;
    let Ok(parts) = list.parse_args_with(parser) else {
        return false;
    };
    let mut parts = parts.iter();
    if list.path.is_ident("all") {
        parts.any(is_for_tests)
    } else {
        list.path.is_ident("any") && parts.all(is_for_tests)
    }
}

/// The path of a type, behind references.
pub(super) fn path_of_type(of: &syn::Type) -> Option<Vec<String>> {
    match of {
        syn::Type::Reference(reference) => path_of_type(&reference.elem),
        syn::Type::Path(path) => Some(names_of(&path.path)),
        _ => None,
    }
}

pub(super) fn names_of(path: &syn::Path) -> Vec<String> {
    let segments = path.segments.iter();
    segments.map(|segment| segment.ident.to_string()).collect()
}

/// The fields in `self.one.two`; none for `self`.
pub(super) fn fields_of_self(expression: &syn::Expr) -> Option<Vec<String>> {
    match expression {
        syn::Expr::Path(path) if path.path.is_ident("self") => Some(Vec::new()),
        syn::Expr::Field(field) => {
            let syn::Member::Named(name) = &field.member else {
                return None;
            };
            let fields = fields_of_self(&field.base)?;
            Some([fields, vec![name.to_string()]].concat())
        }
        _ => None,
    }
}
