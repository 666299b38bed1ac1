package model

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"
)

// The fingerprint is SHA-256 over
//
//	"xpyd-model-1\n"
//	string(canonical Config)
//	uint64 number of tensors
//	digest of each tensor in name order, 32 bytes each
//
// where a tensor's digest is SHA-256 over string(name), string(stored dtype),
// uint64 number of dimensions, each dimension as uint64, uint64 rows order (0:
// as in Hugging Face, else the number of heads interleaved), and the stored
// bytes. Integers are little-endian; string(s) is uint64 length, then bytes.
const fingerprintMagic = "xpyd-model-1\n"

// fingerprint sets m.Fingerprint, from the cache when the files are known.
func (m *Model) fingerprint(ctx context.Context, opts Options) error {
	cache := newPrintCache(m, opts)
	if fp, ok := cache.load(); ok {
		m.Fingerprint = fp
		return nil
	}
	start := time.Now()
	fp, err := m.hash(ctx, opts.Progress)
	if err != nil {
		return fmt.Errorf("fingerprint %s: %w", m.source, err)
	}
	m.Fingerprint = fp
	opts.Log.Debug("model fingerprinted", "model", m.Name, "fingerprint", fp, "seconds", time.Since(start).Seconds())
	if err := cache.save(fp, start); err != nil {
		opts.Log.Warn("fingerprint not remembered: the next start reads all weights again", "err", err)
	}
	return nil
}

// hash digests the tensors in parallel, and then their digests.
func (m *Model) hash(ctx context.Context, report func(Progress)) (string, error) {
	total := int64(0)
	for _, e := range m.tensors {
		total += int64(len(e.raw))
	}
	meter := newMeter(report, "fingerprint", m.source, total)
	names := m.Names()
	digests := make([][sha256.Size]byte, len(names))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, name := range names {
		g.Go(func() (err error) {
			digests[i], err = hashTensor(ctx, name, m.tensors[name], meter)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return "", err
	}
	meter.finish()
	b := appendString([]byte(fingerprintMagic), m.Config.Canonical())
	b = binary.LittleEndian.AppendUint64(b, uint64(len(digests)))
	for _, d := range digests {
		b = append(b, d[:]...)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// hashStep is how many bytes are hashed between checks of the context.
const hashStep = 4 << 20

func hashTensor(ctx context.Context, name string, e entry, meter *meter) (out [sha256.Size]byte, err error) {
	h := sha256.New()
	b := appendString(nil, name)
	b = appendString(b, e.stored)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(e.shape)))
	for _, d := range e.shape {
		b = binary.LittleEndian.AppendUint64(b, uint64(d))
	}
	h.Write(binary.LittleEndian.AppendUint64(b, uint64(e.heads)))
	for rest := e.raw; len(rest) > 0; {
		if err := ctx.Err(); err != nil {
			return out, err
		}
		n := min(len(rest), hashStep)
		h.Write(rest[:n])
		rest = rest[n:]
		meter.add(int64(n))
	}
	h.Sum(out[:0])
	return out, nil
}

func appendString(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
}
