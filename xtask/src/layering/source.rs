//! The words of a Rust source file, without comments, strings and character literals.

/// An identifier or keyword.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub(super) word: &'a str,
    /// Counted from 1.
    pub(super) line: usize,
    /// Part of a path or of a `use`, and not just the name of a variable.
    pub(super) in_path: bool,
}

/// The words of a file in their order.
pub(super) fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut tokens: Vec<Token<'_>> = Vec::new();
    let mut in_use = false;
    let mut after_colons = false;
    let mut at = 0;
    let mut line = 1;
    while let Some(c) = text[at..].chars().next() {
        let length = skipped(&text[at..]);
        if length > 0 {
            line += text[at..at + length].matches('\n').count();
            at += length;
            continue;
        }
        if c.is_alphabetic() || c == '_' || c.is_ascii_digit() {
            let rest = &text[at..];
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            let word = &rest[..end];
            in_use |= word == "use";
            tokens.push(Token { word, line, in_path: in_use || after_colons });
            after_colons = false;
            at += end;
            continue;
        }
        if text[at..].starts_with("::") {
            if let Some(last) = tokens.last_mut() {
                last.in_path = true;
            }
            after_colons = true;
            at += 2;
            continue;
        }
        in_use &= c != ';';
        after_colons &= c.is_whitespace();
        line += usize::from(c == '\n');
        at += c.len_utf8();
    }
    tokens
}

/// The length of the comment, string or character literal at the beginning of `text`; 0 if there is none.
fn skipped(text: &str) -> usize {
    if text.starts_with("//") {
        text.find('\n').unwrap_or(text.len())
    } else if text.starts_with("/*") {
        block_comment(text)
    } else if let Some(length) = raw_string(text) {
        length
    } else if text.starts_with('"') || text.starts_with("b\"") || text.starts_with("c\"") {
        quoted(text, '"')
    } else if text.starts_with("b'") || is_character(text) {
        quoted(text, '\'')
    } else {
        0
    }
}

/// Block comments nest.
fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// `r"..."`, `r#"..."#`, `br"..."` and so on.
fn raw_string(text: &str) -> Option<usize> {
    let after_prefix = ["r", "br", "cr"].iter().find_map(|prefix| text.strip_prefix(prefix))?;
    let hashes = after_prefix.len() - after_prefix.trim_start_matches('#').len();
    let body = after_prefix[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = body.find(&end).map_or(body.len(), |at| at + end.len());
    Some(text.len() - body.len() + length)
}

/// Up to the closing quote, with backslashes.
fn quoted(text: &str, quote: char) -> usize {
    let start = text.find(quote).map_or(0, |at| at + 1);
    let mut escaped = false;
    for (at, c) in text[start..].char_indices() {
        if !escaped && c == quote {
            return start + at + 1;
        }
        escaped = !escaped && c == '\\';
    }
    text.len()
}

/// Whether a `'` begins a character and not a lifetime.
fn is_character(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next() == Some('\'') && matches!((chars.next(), chars.next()), (Some('\\'), _) | (_, Some('\'')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<&str> {
        tokens(text).iter().map(|token| token.word).collect()
    }

    #[test]
    fn comments_and_literals_are_left_out() {
        assert_eq!(words("a // b\nc /* d /* e */ f */ g"), ["a", "c", "g"]);
        assert_eq!(words(r#"a "b \" c" d"#), ["a", "d"]);
        assert_eq!(words("a r#\"b \" c\"# d b\"e\" f"), ["a", "d", "f"]);
        assert_eq!(words(r"a '\'' b 'c' d b'e' f"), ["a", "b", "d", "f"]);
    }

    #[test]
    fn lifetimes_and_raw_names_are_no_literals() {
        assert_eq!(words("fn f<'a>(x: &'a u8) -> char"), ["fn", "f", "a", "x", "a", "u8", "char"]);
        assert_eq!(words("r#type bar \"x\" b"), ["r", "type", "bar", "b"]);
    }

    #[test]
    fn paths_and_uses_are_marked() {
        let marked = |text| -> Vec<&str> {
            tokens(text).into_iter().filter(|token| token.in_path).map(|token| token.word).collect()
        };
        assert_eq!(marked("let a = b::c; d"), ["b", "c"]);
        assert_eq!(marked("use a::{b, c as d}; e"), ["use", "a", "b", "c", "as", "d"]);
    }
}
