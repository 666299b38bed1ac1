package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// decoder describes what each token stands for: the decoding of single tokens, as opposed
// to what depends on their neighbours.
type decoder struct {
	decoding
	byteLevel bool
	fallback  bool // <0x0A> is a byte
	replace   [][2]string
}

// text returns the bytes that piece stands for, and whether they are one byte of a
// byte-fallback run.
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

// byteChars are the characters by which byte-level vocabularies write bytes:
// the byte itself where that is printable in Latin-1, else 256 and up in order
// (GPT-2's bytes_to_unicode). charBytes is the inverse, -1 for no byte.
var byteChars, charBytes = func() (chars [256]rune, bytes [0x144]int16) {
	for i := range bytes {
		bytes[i] = -1
	}
	next := rune(0x100)
	for b := range rune(256) {
		if chars[b] = b; b <= ' ' || b >= 0x7f && b <= 0xa0 || b == 0xad {
			chars[b] = next
			next++
		}
		bytes[chars[b]] = int16(b)
	}
	return chars, bytes
}()

// fromByteLevel returns the bytes that piece writes; it fails if a character stands for no
// byte.
func fromByteLevel(piece string) (string, bool) {
	out := make([]byte, 0, len(piece))
	for _, r := range piece {
		if int(r) >= len(charBytes) || charBytes[r] < 0 {
			return "", false
		}
		out = append(out, byte(charBytes[r]))
	}
	return string(out), true
}
