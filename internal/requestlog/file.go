package requestlog

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"os"
	"time"

	"github.com/xpyd/xpyd/internal/logbuf"
)

// kept is how many older files there are: FILE.1 is the youngest of them.
const kept = 3

// file is the file that is being written, and its key. Each file is a log of its own. While a router takes over
// from another, both write: the newer one renames what the older one goes on with until it is full.
type file struct {
	path  string
	limit int64 // bytes, from which on another is begun
	now   Header

	*os.File
	size int64
	mac  hash.Hash // with the file's key
}

// ready begins a file if there is none, or it is full, or it was moved away and moved says to look.
func (f *file) ready(header func() Header, moved bool) error {
	if f.File != nil && moved && !f.inPlace() {
		f.close()
	}
	if f.File != nil && f.size < f.limit {
		return nil
	}
	if f.File != nil && !f.inPlace() {
		if _, err := os.Lstat(f.path); err == nil { // a router that took over writes there
			return fmt.Errorf("%s is another's by now, and this one's is full", f.path)
		}
	}
	f.close()
	if info, err := os.Lstat(f.path); err == nil && info.Size() > 0 {
		for i := kept; i > 0; i-- {
			if err := os.Rename(f.named(i-1), f.named(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	if f.now.Start.IsZero() {
		f.now.Start = time.Now()
	}
	next := header()
	next.Version, next.Start = Version, f.now.Start
	line, err := json.Marshal(next)
	if err != nil {
		return err
	}
	if f.File, err = logbuf.OpenFile(f.path); err != nil {
		return err
	}
	f.now, f.size = next, 0
	if err := f.add(append(line, '\n')); err != nil {
		f.close()
		f.now.Start = next.Start
		return err
	}
	var key [sha256.Size]byte
	rand.Read(key[:]) // never fails (crypto/rand)
	f.mac = hmac.New(sha256.New, key[:])
	return nil
}

// inPlace reports whether the file is still where it was begun.
func (f *file) inPlace() bool {
	there, err := os.Lstat(f.path)
	own, ownErr := f.Stat()
	return err == nil && ownErr == nil && os.SameFile(there, own)
}

func (f *file) named(older int) string {
	if older == 0 {
		return f.path
	}
	return fmt.Sprintf("%s.%d", f.path, older)
}

// add writes whole lines or nothing.
func (f *file) add(lines []byte) error {
	_, err := f.Write(lines)
	if err == nil {
		f.size += int64(len(lines))
		return nil
	}
	if cut := f.Truncate(f.size); cut != nil { // half a line would spoil the file
		f.close()
		err = errors.Join(err, cut)
	}
	return err
}

// close ends the file; the next one begins now.
func (f *file) close() {
	if f.File != nil {
		_ = f.Close() // what was written stays
		f.File, f.mac, f.now.Start = nil, nil, time.Time{}
	}
}

// keyed are hashes as the file has them.
func (f *file) keyed(chain []uint64) []Hash {
	chain = chain[:min(len(chain), maxPrefix)]
	out := make([]Hash, len(chain))
	var b [8]byte
	var sum [sha256.Size]byte
	for i, h := range chain {
		binary.BigEndian.PutUint64(b[:], h)
		f.mac.Reset()
		f.mac.Write(b[:])
		out[i] = Hash(binary.BigEndian.Uint64(f.mac.Sum(sum[:0])))
	}
	return out
}
