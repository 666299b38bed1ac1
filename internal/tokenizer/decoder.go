package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// decoder says what each token stands for: what it does to one token alone,
// beside the decoding that depends on neighbours.
type decoder struct {
	decoding
	byteLevel bool
	fallback  bool // <0x0A> is a byte
	replace   [][2]string
}

// text returns the bytes that piece stands for, and whether they are one byte
// of a byte-fallback run.
func (d *decoder) text(piece string) (text string, isByte bool) {
	if d.byteLevel {
		if text, ok := fromByteLevel(piece); ok {
			return text, false
		}
		return piece, false
	}
	for _, r := range d.replace {
		piece = strings.ReplaceAll(piece, r[0], r[1])
	}
	if d.fallback && len(piece) == 6 && strings.HasPrefix(piece, "<0x") && piece[5] == '>' {
		if b, err := strconv.ParseUint(piece[3:5], 16, 8); err == nil {
			return string([]byte{byte(b)}), true
		}
	}
	return piece, false
}

func readDecoder(raw json.RawMessage) (decoder, error) {
	var d decoder
	parts, err := flatten(raw, 0)
	if err != nil {
		return d, err
	}
	if len(parts) == 0 {
		return d, errors.New("none, cannot tell how tokens join")
	}
	fused := false
	for i, p := range parts {
		switch {
		case p.Type == "ByteLevel" && len(parts) == 1:
			d.byteLevel = true
		case p.Type == "Metaspace" && i == 0:
			d.replace = append(d.replace, [2]string{spaceMark, " "})
			d.dropFirst = p.PrependScheme != "never" && (p.AddPrefix == nil || *p.AddPrefix)
		case p.Type == "Replace" && p.Pattern.String != nil && *p.Pattern.String != "" && !fused && !d.fallback:
			d.replace = append(d.replace, [2]string{*p.Pattern.String, p.Content})
		case p.Type == "ByteFallback" && !fused:
			d.fallback, d.perByte = true, true
		case p.Type == "Fuse":
			fused = true
		case p.Type == "Strip" && fused && p.Content == " " && p.Stop == 0 && p.Start >= 0 && i == len(parts)-1:
			d.strip = p.Start
		default:
			return d, fmt.Errorf("%s is not supported here", p.Type)
		}
	}
	return d, nil
}

// Byte-level vocabularies write each byte as one printable character: itself
// where it is printable in Latin-1, else 256 and up in order (GPT-2's
// bytes_to_unicode).
func byteChar(b byte) rune {
	switch {
	case b <= ' ':
		return 0x100 + rune(b)
	case b >= 0x7f && b <= 0xa0:
		return 0x121 + rune(b) - 0x7f
	case b == 0xad:
		return 0x143
	}
	return rune(b)
}

// charByte is the inverse of byteChar.
func charByte(r rune) (byte, bool) {
	var b byte
	switch {
	case r >= 0x100 && r <= 0x120:
		b = byte(r - 0x100)
	case r >= 0x121 && r <= 0x142:
		b = byte(r - 0x121 + 0x7f)
	case r == 0x143:
		b = 0xad
	case r >= 0 && r < 0x100:
		b = byte(r)
	default:
		return 0, false
	}
	return b, byteChar(b) == r
}

// fromByteLevel returns the bytes that piece writes; it fails if a character
// stands for none.
func fromByteLevel(piece string) (string, bool) {
	plain := true
	for i := range len(piece) {
		if c := piece[i]; c <= ' ' || c >= 0x7f {
			plain = false
			break
		}
	}
	if plain {
		return piece, true
	}
	out := make([]byte, 0, len(piece))
	for i := 0; i < len(piece); {
		r, n := utf8.DecodeRuneInString(piece[i:])
		b, ok := charByte(r)
		if !ok || r == utf8.RuneError {
			return "", false
		}
		out = append(out, b)
		i += n
	}
	return string(out), true
}
