package zmtp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// appendFrame encodes one frame: flags, the size in 1 or 8 bytes, the body.
func appendFrame(dst []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		dst = append(dst, flags|flagLong)
		dst = binary.BigEndian.AppendUint64(dst, uint64(len(body)))
	} else {
		dst = append(dst, flags, byte(len(body)))
	}
	return append(dst, body...)
}

// appendMessage encodes a message of one or more frames.
func appendMessage(dst []byte, frames [][]byte) []byte {
	for i, f := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = flagMore
		}
		dst = appendFrame(dst, flags, f)
	}
	return dst
}

// appendCommand encodes a command: its name with a length, then the body.
func appendCommand(dst []byte, name string, body []byte) []byte {
	b := append([]byte{byte(len(name))}, name...)
	return appendFrame(dst, flagCommand, append(b, body...))
}

// splitCommand parts a command's name from its body.
func splitCommand(b []byte) (name string, body []byte, err error) {
	if len(b) == 0 || b[0] == 0 || int(b[0]) > len(b)-1 {
		return "", nil, fmt.Errorf("%w: a command without a name", ErrProtocol)
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], nil
}

// growth is how much memory a frame's size alone may claim; the rest comes
// with its bytes.
const growth = 64 << 10

// readFrame appends one frame's body to buf. At most room bytes may follow.
func readFrame(r *bufio.Reader, buf []byte, room int) (flags byte, out []byte, err error) {
	if flags, err = r.ReadByte(); err != nil {
		return 0, buf, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 || flags&flagCommand != 0 && flags&flagMore != 0 {
		return 0, buf, fmt.Errorf("%w: frame flags %#02x", ErrProtocol, flags)
	}
	var size uint64
	if flags&flagLong != 0 {
		var raw [8]byte
		if _, err = io.ReadFull(r, raw[:]); err != nil {
			return 0, buf, cut(err)
		}
		size = binary.BigEndian.Uint64(raw[:])
	} else {
		b, err := r.ReadByte()
		if err != nil {
			return 0, buf, cut(err)
		}
		size = uint64(b)
	}
	if size > uint64(room) {
		return 0, buf, fmt.Errorf("%w: %d bytes, %d allowed", ErrTooLarge, size, room)
	}
	for left := int(size); left > 0; {
		n, at := min(left, growth), len(buf)
		buf = append(buf, make([]byte, n)...)
		if _, err = io.ReadFull(r, buf[at:]); err != nil {
			return 0, buf[:at], cut(err)
		}
		left -= n
	}
	return flags, buf, nil
}

// cut makes an end in the middle of a frame different from one between two.
func cut(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
