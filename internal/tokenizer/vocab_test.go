package tokenizer_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/tokenizer"
)

// read returns a file of testdata, unpacked if only the .gz exists.
func read(t testing.TB, name string) []byte {
	t.Helper()
	path := filepath.Join("testdata", name)
	if b, err := os.ReadFile(path); err == nil && !strings.HasSuffix(name, ".gz") {
		return b
	}
	f, err := os.Open(strings.TrimSuffix(path, ".gz") + ".gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(bufio.NewReader(f))
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// vocabularies are read once for all tests of a run.
var vocabularies sync.Map

func load(t testing.TB, name string) *tokenizer.Tokenizer {
	t.Helper()
	if v, ok := vocabularies.Load(name); ok {
		return v.(*tokenizer.Tokenizer)
	}
	tok, err := build(t, name)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	vocabularies.Store(name, tok)
	return tok
}

const llama3Regex = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// build makes a vocabulary, or a variant of one that make_goldens.py makes too.
func build(t testing.TB, name string) (*tokenizer.Tokenizer, error) {
	type object = map[string]any
	var config []byte
	base := name
	edit := func(object) {}
	switch name {
	case "qwen3", "stories260k":
		config = read(t, name+".config.json")
	case "gpt2.gguf":
		return tokenizer.FromGGUF(ggufMeta(t, read(t, "gpt-2.gguf.gz")))
	case "stories260k.gguf":
		return tokenizer.FromGGUF(tok512Meta(t))
	case "llama3":
		base = "smollm2"
		edit = func(f object) {
			f["model"].(object)["ignore_merges"] = true
			f["pre_tokenizer"] = object{"type": "Sequence", "pretokenizers": []object{
				{"type": "Split", "pattern": object{"Regex": llama3Regex}, "behavior": "Isolated"},
				{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}}}
		}
	case "metaspace-first", "metaspace-always":
		base = "stories260k"
		edit = func(f object) {
			f["normalizer"] = nil
			f["pre_tokenizer"] = object{"type": "Metaspace", "replacement": "▁",
				"prepend_scheme": strings.TrimPrefix(name, "metaspace-"), "split": name == "metaspace-always"}
		}
	case "added":
		base = "gpt2"
		edit = func(f object) {
			f["normalizer"] = object{"type": "NFC"}
			for i, a := range []object{
				{"content": "<l>", "lstrip": true}, {"content": "<r>", "rstrip": true},
				{"content": "<lr>", "lstrip": true, "rstrip": true, "special": true},
				{"content": "é!", "normalized": true}, {"content": "<lr>x"}, {"content": "word", "single_word": true}} {
				if a["id"] = 50257 + i; a["content"] == "word" {
					a["id"] = 4775 // in the vocabulary already
				}
				f["added_tokens"] = append(f["added_tokens"].([]any), a)
			}
		}
	}
	raw := read(t, base+".json")
	if base != name {
		var f object
		if err := json.Unmarshal(raw, &f); err != nil {
			return nil, err
		}
		edit(f)
		var err error
		if raw, err = json.Marshal(f); err != nil {
			return nil, err
		}
	}
	return tokenizer.FromJSON(raw, config)
}

// tok512Meta is stories260K's vocabulary as GGUF metadata, read from llama2.c's
// tokenizer.bin: int32 longest, then {float32 score, int32 length, bytes}.
func tok512Meta(t testing.TB) map[string]any {
	b := read(t, "tok512.bin")[4:]
	var tokens []string
	var scores []float32
	var types []int32
	for len(b) > 0 {
		scores = append(scores, math.Float32frombits(binary.LittleEndian.Uint32(b)))
		n := binary.LittleEndian.Uint32(b[4:])
		piece := strings.ReplaceAll(string(b[8:8+n]), " ", "▁")
		kind := int32(1)
		switch id := len(tokens); {
		case id == 0:
			kind, piece = 2, "<unk>"
		case id == 1:
			kind, piece = 3, "<s>"
		case id == 2:
			kind, piece = 3, "</s>"
		case id < 259:
			kind, piece = 6, fmt.Sprintf("<0x%02X>", id-3)
		}
		types = append(types, kind)
		tokens = append(tokens, piece)
		b = b[8+n:]
	}
	return map[string]any{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
		"tokenizer.ggml.token_type": types, "tokenizer.ggml.bos_token_id": uint32(1), "tokenizer.ggml.eos_token_id": uint32(2)}
}

// ggufMeta reads the metadata of a GGUF file that the tests trust.
func ggufMeta(t testing.TB, b []byte) map[string]any {
	r := bytes.NewReader(b[24:])
	count := binary.LittleEndian.Uint64(b[16:])
	get := func(v any) {
		if err := binary.Read(r, binary.LittleEndian, v); err != nil {
			t.Fatal(err)
		}
	}
	str := func() string {
		var n uint64
		get(&n)
		s, err := io.ReadAll(io.LimitReader(r, int64(n)))
		if err != nil {
			t.Fatal(err)
		}
		return string(s)
	}
	meta := map[string]any{}
	for range count {
		key := str()
		var kind, item uint32
		var n uint64
		switch get(&kind); kind {
		case 4:
			var v uint32
			get(&v)
			meta[key] = v
		case 6:
			var v float32
			get(&v)
			meta[key] = v
		case 8:
			meta[key] = str()
		case 9:
			get(&item)
			get(&n)
			switch item {
			case 5:
				v := append([]int32(nil), bytesToInt32(t, r, int(n))...)
				meta[key] = v
			case 8:
				var v []string
				for range n {
					v = append(v, str())
				}
				meta[key] = v
			default:
				t.Fatalf("array of type %d", item)
			}
		default:
			t.Fatalf("%s has type %d", key, kind)
		}
	}
	return meta
}

func bytesToInt32(t testing.TB, r io.Reader, n int) []int32 {
	var out []int32
	for range n {
		var v int32
		if err := binary.Read(r, binary.LittleEndian, &v); err != nil {
			t.Fatal(err)
		}
		out = append(out, v)
	}
	return out
}
