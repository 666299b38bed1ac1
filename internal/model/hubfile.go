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

	f       *os.File // being filled
	have    int64    // bytes in f
	resumed bool     // f had some when filling began
	meter   *meter
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
	err = h.fill(ctx, j, part, meter)
	if errors.Is(err, errChecksum) {
		if rerr := os.Remove(part); rerr != nil {
			return rerr
		}
		if j.resumed { // what an earlier run left may have been bad: once more, whole
			h.opts.Log.Warn("resumed download has a wrong checksum: downloading it whole", "file", j.name)
			meter.add(-j.size)
			if err = h.fill(ctx, j, part, meter); errors.Is(err, errChecksum) {
				os.Remove(part)
			}
		}
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

// fill downloads what part lacks, and verifies it.
func (h *hub) fill(ctx context.Context, j *job, part string, meter *meter) (err error) {
	if j.f, err = os.OpenFile(part, os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return err
	}
	defer func() {
		if cerr := j.f.Close(); err == nil {
			err = cerr
		}
	}()
	if j.have, err = j.f.Seek(0, io.SeekEnd); err != nil {
		return err
	}
	j.meter = meter
	meter.add(j.have)
	if j.have > j.size { // also where no size is stated: size is 0 then
		if err := j.restart(); err != nil {
			return err
		}
	}
	j.resumed = j.have > 0
	if !j.sized || j.have < j.size {
		if err := h.retry(ctx, false, func() (bool, error) { return h.pull(ctx, j) }); err != nil {
			return err
		}
	}
	if err := j.f.Sync(); err != nil {
		return err
	}
	return verify(ctx, j.f, j.have, j.etag)
}

// restart forgets the bytes in the file.
func (j *job) restart() error {
	j.meter.add(-j.have)
	j.have = 0
	if err := j.f.Truncate(0); err != nil {
		return fatal{err}
	}
	return nil
}

// enoughProgress is how many bytes reset the count of failed attempts.
const enoughProgress = 64 << 10

// pull makes one request for the rest of the file and stores what comes.
func (h *hub) pull(ctx context.Context, j *job) (progress bool, err error) {
	resp, err := h.get(ctx, http.MethodGet, h.url(j), j.have)
	if status := (*statusError)(nil); errors.As(err, &status) && status.status == http.StatusRequestedRangeNotSatisfiable && j.have > 0 {
		status.retryable = true
		return false, errors.Join(err, j.restart())
	}
	if err != nil {
		return false, err
	}
	defer resp.body.Close()
	if j.have > 0 {
		want := "bytes " + strconv.FormatInt(j.have, 10) + "-"
		if resp.status != http.StatusPartialContent {
			if err := j.restart(); err != nil { // a server without ranges
				return false, err
			}
		} else if got := resp.header.Get("Content-Range"); !strings.HasPrefix(got, want) {
			return false, fatal{fmt.Errorf("content range %.80q where %q was asked", got, want)}
		}
	}
	start := j.have
	buf := make([]byte, 256<<10)
	for {
		n, rerr := resp.body.Read(buf)
		if j.sized && j.have+int64(n) > j.size {
			return false, fatal{fmt.Errorf("more than the stated %d bytes arrive", j.size)}
		}
		if _, err := j.f.WriteAt(buf[:n], j.have); err != nil {
			return false, fatal{err}
		}
		j.have += int64(n)
		j.meter.add(int64(n))
		if rerr == nil {
			continue
		}
		if rerr == io.EOF && (!j.sized || j.have == j.size) {
			return true, nil
		}
		if rerr == io.EOF {
			rerr = io.ErrUnexpectedEOF
		}
		if !j.sized { // cannot be resumed
			return false, errors.Join(rerr, j.restart())
		}
		return j.have-start >= enoughProgress, rerr
	}
}

var errChecksum = errors.New("checksum differs")

// verify compares the file with its ETag: SHA-256 for files in large-file
// storage, git's blob SHA-1 for others. Other ETags say nothing.
func verify(ctx context.Context, f *os.File, size int64, etag string) error {
	var sum hash.Hash
	switch {
	case sha256Re.MatchString(etag):
		sum = sha256.New()
	case sha1Tag.MatchString(etag):
		sum = sha1.New()
		fmt.Fprintf(sum, "blob %d\x00", size)
	default:
		return nil
	}
	r := io.NewSectionReader(f, 0, size)
	for {
		_, err := io.CopyN(sum, r, hashStep)
		if err == io.EOF {
			break
		}
		if err = errors.Join(err, ctx.Err()); err != nil {
			return err
		}
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != etag {
		return fmt.Errorf("%w: it is %s, the hub states %s", errChecksum, got, etag)
	}
	return nil
}
