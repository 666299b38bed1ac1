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

// appendHeader encodes what precedes a frame's body: flags, and the size in 1 or 8 bytes.
func appendHeader(dst []byte, flags byte, size int) []byte {
	if size > 255 {
		return binary.BigEndian.AppendUint64(append(dst, flags|flagLong), uint64(size))
	}
	return append(dst, flags, byte(size))
}

// appendFrame encodes one frame.
func appendFrame(dst []byte, flags byte, body []byte) []byte {
	return append(appendHeader(dst, flags, len(body)), body...)
}

// command builds a command's body: its name with a length, then the data.
func command(name string, body []byte) []byte {
	return append(append([]byte{byte(len(name))}, name...), body...)
}

// splitCommand separates a command's name from its data.
func splitCommand(b []byte) (name string, body []byte, err error) {
	if len(b) == 0 || b[0] == 0 || int(b[0]) > len(b)-1 {
		return "", nil, fmt.Errorf("%w: a command without a name", ErrProtocol)
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], nil
}

// growth bounds the memory that a frame's size alone may claim; the rest comes as bytes arrive.
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

// cut turns an EOF inside a frame into a different error from one between frames.
func cut(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
