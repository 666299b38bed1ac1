package model

import (
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// job is one file to download.
type job struct {
	commit, name string
	etag         string // set by head: the blob's name
	size         int64  // set by head; 0 when the hub does not state it
	sized        bool   // it did
}

var (
	cleanTag = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)
	sha1Tag  = regexp.MustCompile(`^[0-9a-f]{40}$`)
	sha256Re = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

func (h *hub) url(j *job) *url.URL {
	return h.endpoint.JoinPath(h.owner, h.name, "resolve", j.commit, url.PathEscape(j.name))
}

// head asks for the file's checksum and size.
func (h *hub) head(ctx context.Context, j *job) error {
	return h.retry(ctx, false, func() (bool, error) {
		resp, err := h.get(ctx, http.MethodHead, h.url(j), 0)
		if err != nil {
			return false, err
		}
		resp.body.Close()
		j.etag = strings.Trim(strings.TrimPrefix(resp.etag, "W/"), `"`)
		if !cleanTag.MatchString(j.etag) {
			return false, fatal{fmt.Errorf("the hub's ETag %.80q is missing or unusable", resp.etag)}
		}
		if j.sized = resp.size >= 0; j.sized {
			j.size = resp.size
		}
		return false, nil
	})
}

// bring puts the file's content into the cache and links it into the
// snapshot. The blob's lock keeps other processes and tools out meanwhile.
func (h *hub) bring(ctx context.Context, j *job, meter *meter) error {
	unlock, err := h.cache.lock(ctx, j.etag)
	if err != nil {
		return err
	}
	defer unlock()
	blob := h.cache.blob(j.etag)
	if st, err := os.Stat(blob); err == nil && (!j.sized || st.Size() == j.size) {
		meter.add(j.size)
		return h.cache.link(j.commit, j.name, j.etag)
	}
	if err := os.MkdirAll(filepath.Dir(blob), 0o755); err != nil {
		return err
	}
	part := blob + ".incomplete"
	resumed, err := h.fill(ctx, j, part, meter)
	if err != nil {
		return err
	}
	err = verify(ctx, part, j.etag)
	if bad := (*checksumError)(nil); errors.As(err, &bad) && resumed {
		// What was there from an earlier run may have been bad: once more, whole.
		h.opts.Log.Warn("resumed download has a wrong checksum: downloading it whole", "file", j.name)
		if err := os.Remove(part); err != nil {
			return err
		}
		meter.add(-j.size)
		if _, err := h.fill(ctx, j, part, meter); err != nil {
			return err
		}
		err = verify(ctx, part, j.etag)
	}
	if bad := (*checksumError)(nil); errors.As(err, &bad) {
		os.Remove(part)
	}
	if err != nil {
		return err
	}
	if !sha1Tag.MatchString(j.etag) && !sha256Re.MatchString(j.etag) {
		h.opts.Log.Warn("the hub states no checksum: only the size was checked", "file", j.name, "etag", j.etag)
	}
	if err := os.Rename(part, blob); err != nil {
		return err
	}
	return h.cache.link(j.commit, j.name, j.etag)
}

// fill downloads what part lacks. resumed tells that it had something.
func (h *hub) fill(ctx context.Context, j *job, part string, meter *meter) (resumed bool, err error) {
	f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return false, err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	have, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return false, err
	}
	d := &fileDownload{job: j, f: f, meter: meter}
	if have > j.size { // also where no size is stated: size is 0 then
		if err := f.Truncate(0); err != nil {
			return false, err
		}
		have = 0
	}
	if d.have, resumed = have, have > 0; resumed {
		meter.add(have)
	}
	if !j.sized || d.have < j.size {
		if err := h.retry(ctx, false, func() (bool, error) { return h.pull(ctx, d) }); err != nil {
			return resumed, err
		}
	}
	return resumed, f.Sync()
}

// fileDownload is a file being filled.
type fileDownload struct {
	*job
	f     *os.File
	have  int64 // bytes in f
	meter *meter
}

// restart forgets the bytes in the file.
func (d *fileDownload) restart() error {
	d.meter.add(-d.have)
	d.have = 0
	if err := d.f.Truncate(0); err != nil {
		return fatal{err}
	}
	return nil
}

// enoughProgress is what resets the count of failed attempts, bytes.
const enoughProgress = 64 << 10

// pull makes one request for the rest of the file and stores what comes.
func (h *hub) pull(ctx context.Context, d *fileDownload) (progress bool, err error) {
	resp, err := h.get(ctx, http.MethodGet, h.url(d.job), d.have)
	if status := (*statusError)(nil); errors.As(err, &status) && status.status == http.StatusRequestedRangeNotSatisfiable && d.have > 0 {
		status.retryable = true
		return false, errors.Join(err, d.restart())
	}
	if err != nil {
		return false, err
	}
	defer resp.body.Close()
	if d.have > 0 {
		want := "bytes " + strconv.FormatInt(d.have, 10) + "-"
		if resp.status != http.StatusPartialContent {
			if err := d.restart(); err != nil { // a server without ranges
				return false, err
			}
		} else if got := resp.header.Get("Content-Range"); !strings.HasPrefix(got, want) {
			return false, fatal{fmt.Errorf("content range %.80q where %q was asked", got, want)}
		}
	}
	start := d.have
	buf := make([]byte, 256<<10)
	for {
		n, rerr := resp.body.Read(buf)
		if d.sized && d.have+int64(n) > d.size {
			return false, fatal{fmt.Errorf("more than the stated %d bytes arrive", d.size)}
		}
		if _, err := d.f.WriteAt(buf[:n], d.have); err != nil {
			return false, fatal{err}
		}
		d.have += int64(n)
		d.meter.add(int64(n))
		if rerr == nil {
			continue
		}
		if rerr == io.EOF && (!d.sized || d.have == d.size) {
			return true, nil
		}
		if rerr == io.EOF {
			rerr = io.ErrUnexpectedEOF
		}
		if !d.sized { // cannot be resumed
			return false, errors.Join(rerr, d.restart())
		}
		return d.have-start >= enoughProgress, rerr
	}
}

// checksumError is content that is not what its ETag says.
type checksumError struct{ want, got string }

func (e *checksumError) Error() string {
	return fmt.Sprintf("checksum is %s, the hub states %s", e.got, e.want)
}

// verify compares the file with its ETag: SHA-256 for files in large-file
// storage, git's blob SHA-1 for others. Other ETags say nothing.
func verify(ctx context.Context, path, etag string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var sum hash.Hash
	switch {
	case sha256Re.MatchString(etag):
		sum = sha256.New()
	case sha1Tag.MatchString(etag):
		st, err := f.Stat()
		if err != nil {
			return err
		}
		sum = sha1.New()
		sum.Write(fmt.Appendf(nil, "blob %d\x00", st.Size()))
	default:
		return nil
	}
	buf := make([]byte, 1<<20)
	for {
		n, err := f.Read(buf)
		sum.Write(buf[:n])
		if err == io.EOF {
			break
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != etag {
		return &checksumError{want: etag, got: got}
	}
	return nil
}
