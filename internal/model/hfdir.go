package model

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/model/arch"
)

// Sizes that the small files of a model may have.
const (
	maxConfigBytes    = 4 << 20
	maxTokenizerBytes = 256 << 20
)

// folder is a directory in Hugging Face layout: on disk, or in the binary.
type folder struct {
	fs   fs.FS
	root string // "" in the binary: nothing to map
}

// path is a file's name for errors.
func (d folder) path(name string) string { return filepath.Join(d.root, name) }

// read returns a file of at most limit bytes.
func (d folder) read(name string, limit int64) ([]byte, error) {
	if st, err := fs.Stat(d.fs, name); err == nil && !st.Mode().IsRegular() { // opening a pipe would wait
		return nil, fmt.Errorf("%s: not a regular file", d.path(name))
	}
	f, err := d.fs.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", d.path(name), err)
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("%s: larger than %d bytes", d.path(name), limit)
	}
	return b, nil
}

// optional is read for a file that need not exist.
func (d folder) optional(name string, limit int64) ([]byte, error) {
	b, err := d.read(name, limit)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

func (d folder) exists(name string) bool {
	_, err := fs.Stat(d.fs, name)
	return err == nil
}

func (d folder) mapFile(name string) (*mapping, error) {
	if d.root != "" {
		return mapFile(d.path(name))
	}
	b, err := fs.ReadFile(d.fs, name)
	return &mapping{data: b}, err
}

func openDir(dir string) (*Model, error) {
	d := folder{fs: os.DirFS(dir), root: dir}
	if !d.exists("config.json") {
		if ggufs, _ := fs.Glob(d.fs, "*.gguf"); len(ggufs) > 0 {
			return nil, fmt.Errorf("%s: no config.json; to serve a GGUF file name the file itself: %s", dir, d.path(ggufs[0]))
		}
		return nil, fmt.Errorf("%s: no config.json, which a model's directory has", dir)
	}
	m, err := openFolder(d)
	if err != nil {
		return nil, err
	}
	m.Name = nameOf(dir)
	return m, nil
}

// snapshotDir matches a snapshot inside the hub's cache.
var snapshotDir = regexp.MustCompile(`(?:^|/)models--([^/]+)--([^/]+)/snapshots/[^/]+$`)

// nameOf is the directory's base name, or OWNER/NAME inside the hub's cache.
func nameOf(dir string) string {
	abs := dir
	if p, err := filepath.Abs(dir); err == nil {
		abs = p
	}
	if s := snapshotDir.FindStringSubmatch(filepath.ToSlash(abs)); s != nil {
		return s[1] + "/" + s[2]
	}
	return filepath.Base(abs)
}

// openFolder reads everything but the name and the fingerprint.
func openFolder(d folder) (_ *Model, err error) {
	b, err := d.read("config.json", maxConfigBytes)
	if err != nil {
		return nil, err
	}
	m := &Model{source: d.root}
	if m.Config, err = arch.ReadHF(b); err != nil {
		return nil, fmt.Errorf("%s: %w", d.path("config.json"), err)
	}
	m.TorchDType = torchDType(b)
	if b, err = d.optional("generation_config.json", maxConfigBytes); err != nil {
		return nil, err
	}
	if b != nil {
		if m.Generation, err = parseGeneration(b); err != nil {
			return nil, fmt.Errorf("%s: %w", d.path("generation_config.json"), err)
		}
		m.Config.EOS = arch.IDs(m.Config.EOS).With(m.Generation.EOS...)
	}
	for i, name := range []string{"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} {
		if m.tokenizer[i], err = d.optional(name, maxTokenizerBytes); err != nil {
			return nil, err
		}
	}
	defer func() {
		if err != nil {
			_ = m.Close()
		}
	}()
	have, err := m.mapSafetensors(d)
	if err != nil {
		return nil, err
	}
	m.tensors, err = choose(&m.Config, d.path("*.safetensors"), have, false)
	return m, err
}

// torchDType returns the type to compute in: config.json's dtype, torch_dtype before
// transformers 5. It is a hint: anything but a string is ignored.
func torchDType(b []byte) string {
	var c struct {
		Old any `json:"torch_dtype"`
		New any `json:"dtype"`
	}
	if json.Unmarshal(b, &c) != nil {
		return ""
	}
	name, _ := c.New.(string)
	old, _ := c.Old.(string)
	return cmp.Or(name, old)
}

const indexName = "model.safetensors.index.json"

// weightFiles returns the files that hold a model's weights: those of the index, else
// model.safetensors, else every *.safetensors. From an index it also returns the file of
// each tensor.
func weightFiles(all []string, readIndex func() ([]byte, error)) (files []string, owner map[string]string, err error) {
	switch {
	case slices.Contains(all, indexName):
		b, err := readIndex()
		if err == nil {
			owner, err = parseIndex(b)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", indexName, err)
		}
		return filesOf(owner), owner, nil
	case slices.Contains(all, "model.safetensors"):
		return []string{"model.safetensors"}, nil, nil
	}
	for _, f := range all {
		if bareName(f) && strings.HasSuffix(f, ".safetensors") && !strings.HasPrefix(f, "consolidated") {
			files = append(files, f)
		}
	}
	return files, nil, nil
}

// weights is weightFiles of the folder.
func (d folder) weights() (files []string, owner map[string]string, err error) {
	entries, err := fs.ReadDir(d.fs, ".")
	if err != nil {
		return nil, nil, err
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return weightFiles(all, func() ([]byte, error) { return d.read(indexName, maxHeaderBytes) })
}

// mapSafetensors maps the directory's weight files and lists their tensors.
func (m *Model) mapSafetensors(d folder) (map[string]stored, error) {
	files, owner, err := d.weights()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.root, err)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: no .safetensors file (weights in other formats, such as pytorch_model.bin, are not supported)", d.root)
	}
	have := make(map[string]stored)
	for _, file := range files {
		mp, err := d.mapFile(file)
		if err != nil {
			return nil, err
		}
		m.maps = append(m.maps, mp)
		ts, err := parseSafetensors(mp.data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.path(file), err)
		}
		for name, s := range ts {
			if owner != nil && owner[name] != file {
				continue
			}
			if other, twice := have[name]; twice {
				return nil, fmt.Errorf("%s: tensor %s is also in %s", d.path(file), name, other.file)
			}
			s.file = d.path(file)
			have[name] = s
		}
	}
	for name, file := range owner {
		if _, ok := have[name]; !ok {
			return nil, fmt.Errorf("%s: tensor %s is missing; %s lists it there", d.path(file), name, indexName)
		}
	}
	return have, nil
}

// GenerationConfig holds generation_config.json's sampling defaults; nil if absent. Its
// end ids are merged into Config.EOS.
type GenerationConfig struct {
	Temperature       *float32 `json:"temperature"`
	TopP              *float32 `json:"top_p"`
	TopK              *int     `json:"top_k"`
	MinP              *float32 `json:"min_p"`
	RepetitionPenalty *float32 `json:"repetition_penalty"`
	EOS               []int32  `json:"-"`
	Ignored           []string `json:"-"` // keys with values out of range, which are left out
}

// parseGeneration reads generation_config.json.
func parseGeneration(b []byte) (GenerationConfig, error) {
	var g struct {
		GenerationConfig
		EOS arch.IDs `json:"eos_token_id"`
	}
	if err := json.Unmarshal(b, &g); err != nil {
		return GenerationConfig{}, err
	}
	g.GenerationConfig.EOS = g.EOS
	g.check()
	return g.GenerationConfig, nil
}

// check drops values that no request could have.
func (g *GenerationConfig) check() {
	f := func(key string, v **float32, ok func(v float32) bool) {
		if *v != nil && !ok(**v) {
			g.Ignored = append(g.Ignored, fmt.Sprintf("%s: %v", key, **v))
			*v = nil
		}
	}
	f("temperature", &g.Temperature, func(v float32) bool { return v >= 0 })
	f("top_p", &g.TopP, func(v float32) bool { return v > 0 && v <= 1 })
	f("min_p", &g.MinP, func(v float32) bool { return v >= 0 && v <= 1 })
	f("repetition_penalty", &g.RepetitionPenalty, func(v float32) bool { return v > 0 })
	if g.TopK != nil && (*g.TopK < -1 || *g.TopK > math.MaxInt32) {
		g.Ignored = append(g.Ignored, fmt.Sprintf("top_k: %d", *g.TopK))
		g.TopK = nil
	}
}
