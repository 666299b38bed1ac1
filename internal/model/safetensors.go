package model

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/kernels"
)

// Bounds on foreign headers. The safetensors format allows 100 MB.
const (
	maxHeaderBytes = 100_000_000
	maxTensors     = 1 << 17
	maxDims        = 8
	maxShards      = 1 << 12
)

// safetensorBits is the element size of each dtype of the format, in bits.
var safetensorBits = map[string]uint64{
	"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
	"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
	"U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}

// parseSafetensors reads the header of a whole file and returns windows on
// data. As the format demands, the tensors cover the data exactly: no hole,
// no overlap. Layout: uint64 n, n bytes of JSON, data.
func parseSafetensors(data []byte) (map[string]stored, error) {
	if len(data) < 8 {
		return nil, fmt.Errorf("safetensors header: file of %d bytes is too short", len(data))
	}
	n := binary.LittleEndian.Uint64(data)
	if n > maxHeaderBytes || n > uint64(len(data)-8) {
		return nil, fmt.Errorf("safetensors header: length %d does not fit a file of %d bytes", n, len(data))
	}
	header, body := data[8:8+n], data[8+n:]
	if len(header) == 0 || header[0] != '{' {
		return nil, errors.New("safetensors header: does not begin with '{'")
	}
	ts := make(map[string]stored)
	var spans []span
	err := eachKey(header, func(name string, dec *json.Decoder) error {
		if name == "__metadata__" {
			var ignored map[string]string
			return dec.Decode(&ignored)
		}
		if len(ts) == maxTensors {
			return fmt.Errorf("more than %d tensors", maxTensors)
		}
		s, sp, err := readTensor(dec, body)
		if err != nil {
			return err
		}
		sp.name = name
		ts[name], spans = s, append(spans, sp)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("safetensors header: %w", err)
	}
	slices.SortFunc(spans, span.compare)
	at := uint64(0)
	for _, sp := range spans {
		if sp.begin != at {
			return nil, fmt.Errorf("safetensors header: tensor %s begins at %d, the one before it ends at %d", sp.name, sp.begin, at)
		}
		at = sp.end
	}
	if at != uint64(len(body)) {
		return nil, fmt.Errorf("safetensors header: tensors cover %d of %d data bytes", at, len(body))
	}
	return ts, nil
}

// span is where a tensor's bytes lie.
type span struct {
	name       string
	begin, end uint64
}

func (s span) compare(o span) int {
	return cmp.Or(cmp.Compare(s.begin, o.begin), cmp.Compare(s.end, o.end))
}

// readTensor decodes one header entry and cuts its bytes out of body.
func readTensor(dec *json.Decoder, body []byte) (stored, span, error) {
	var h struct {
		DType   string   `json:"dtype"`
		Shape   []uint64 `json:"shape"`
		Offsets []uint64 `json:"data_offsets"`
	}
	if err := dec.Decode(&h); err != nil {
		return stored{}, span{}, err
	}
	bits, known := safetensorBits[h.DType]
	if !known {
		return stored{}, span{}, fmt.Errorf("dtype %.20q is unknown", h.DType)
	}
	if h.Shape == nil || len(h.Shape) > maxDims {
		return stored{}, span{}, fmt.Errorf("shape of %d dimensions", len(h.Shape))
	}
	if len(h.Offsets) != 2 || h.Offsets[0] > h.Offsets[1] || h.Offsets[1] > uint64(len(body)) {
		return stored{}, span{}, fmt.Errorf("data_offsets %v do not lie in %d data bytes", h.Offsets, len(body))
	}
	total, ok := checkedProduct(append(slices.Clone(h.Shape), bits))
	if size := h.Offsets[1] - h.Offsets[0]; !ok || total%8 != 0 || total/8 != size {
		return stored{}, span{}, fmt.Errorf("shape %v of %s does not fill %d bytes", h.Shape, h.DType, size)
	}
	s := stored{entry: entry{stored: h.DType, shape: make([]int, len(h.Shape)), raw: body[h.Offsets[0]:h.Offsets[1]:h.Offsets[1]]}}
	for i, d := range h.Shape {
		if s.shape[i] = int(d); d > math.MaxInt32 {
			return stored{}, span{}, fmt.Errorf("shape %v is too large", h.Shape)
		}
	}
	switch h.DType {
	case "F32":
		s.dtype = kernels.F32
	case "F16":
		s.dtype = kernels.F16
	case "BF16":
		s.dtype = kernels.BF16
	case storedF8:
		s.dtype = kernels.F32 // widened, once choose has found its scales
	default:
		s.why = fmt.Sprintf("dtype %s is not supported (F32, F16, BF16 and F8_E4M3 are)", h.DType)
	}
	return s, span{begin: h.Offsets[0], end: h.Offsets[1]}, nil
}

// parseIndex reads model.safetensors.index.json: tensor name -> file name.
// File names are bare: nothing outside the directory can be named.
func parseIndex(b []byte) (map[string]string, error) {
	owner := make(map[string]string)
	err := eachKey(b, func(key string, dec *json.Decoder) error {
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil || key != "weight_map" {
			return err
		}
		return eachKey(raw, func(name string, dec *json.Decoder) error {
			var file string
			if err := dec.Decode(&file); err != nil {
				return err
			}
			if !bareName(file) || !strings.HasSuffix(file, ".safetensors") {
				return fmt.Errorf("file name %.80q is not a plain .safetensors name", file)
			}
			if len(owner) == maxTensors {
				return fmt.Errorf("more than %d tensors", maxTensors)
			}
			owner[name] = file
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	if len(owner) == 0 {
		return nil, errors.New("weight_map is missing or empty")
	}
	if n := len(filesOf(owner)); n > maxShards {
		return nil, fmt.Errorf("weight_map names %d files, more than %d", n, maxShards)
	}
	return owner, nil
}

// filesOf lists the distinct files of an index, sorted.
func filesOf(owner map[string]string) []string {
	return slices.Compact(slices.Sorted(maps.Values(owner)))
}

// bareName reports whether name is safe as a file name in any folder.
func bareName(name string) bool {
	return name != "" && len(name) <= 255 && name[0] != '.' && !strings.ContainsAny(name, "/\\:\x00")
}

// eachKey walks one JSON object. fn must consume the key's value from dec.
// Repeated keys, and anything but space after the object, are errors; errors
// of fn are wrapped with the key.
func eachKey(b []byte, fn func(key string, dec *json.Decoder) error) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	t, err := dec.Token()
	if err != nil {
		return noEOF(err)
	}
	if t != json.Delim('{') {
		return fmt.Errorf("%v where an object should begin", t)
	}
	seen := make(map[string]struct{})
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return noEOF(err)
		}
		key, ok := t.(string)
		if !ok {
			return fmt.Errorf("%v where a key should be", t)
		}
		if _, twice := seen[key]; twice {
			return fmt.Errorf("%.120s: key appears twice", key)
		}
		seen[key] = struct{}{}
		if err := fn(key, dec); err != nil {
			return fmt.Errorf("%.120s: %w", key, noEOF(err))
		}
	}
	if _, err := dec.Token(); err != nil {
		return noEOF(err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("text after the object")
	}
	return nil
}

// noEOF turns the EOF of cut JSON into an error that says so.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
