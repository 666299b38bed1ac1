// Package model reads weights: the embedded stories260k, Hugging Face
// directories (config.json and safetensors), GGUF files, and Hugging Face
// hub repositories, which it downloads into the hub's own cache layout.
//
// Whatever the source, a [Model] has an [arch.Config] and the tensors that its
// architecture lists, under Hugging Face's names and with rows in rotate-half
// order. Open checks that each is there with the right shape, and refuses what
// would compute something else: a model that opens can be served.
//
// Non-goals: computing with the weights, tokenising, writing models (tests
// find a writer in modeltest), formats that can execute code (pickle).
package model

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// EmbeddedName is the name of the model inside the binary.
const EmbeddedName = "stories260k"

// Options for Open. The zero value is usable.
type Options struct {
	// Log receives warnings, and a line for each step; nil discards them.
	Log *slog.Logger
	// Progress, if set, is called during a download or a fingerprint: by one
	// goroutine at a time, at most ten times a second, and once at the end of
	// each phase. It must not block for long.
	Progress func(Progress)
	// CacheDir holds remembered fingerprints; "" is the user's cache directory
	// (os.UserCacheDir), folder xpyd.
	CacheDir string
	// Getenv reads HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE,
	// HF_HUB_OFFLINE and XDG_CACHE_HOME; nil is os.Getenv.
	Getenv func(string) string
	// HTTP talks to the hub; nil is a client of its own. Its CheckRedirect and
	// Timeout are replaced.
	HTTP *http.Client
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	return o
}

// Model is one opened model. Its methods may be called concurrently, except
// Close, which comes last.
type Model struct {
	// Name is what clients call the model: "stories260k", the directory's
	// base name, the file's without ".gguf", or "OWNER/NAME" on the hub.
	Name   string
	Config arch.Config
	// TorchDType is the type that the model's makers compute in ("float16",
	// "bfloat16", "float32"), "" if unknown. It is not in the fingerprint, which
	// has the types that the weights are stored in.
	TorchDType string
	// Generation holds the defaults that generation_config.json asks for.
	Generation GenerationConfig
	// Fingerprint is 64 hex digits over the Config and every tensor's name,
	// dtype, shape and stored bytes. Equal fingerprints mean equal models.
	Fingerprint string

	source    string // for errors: a path, or "embedded stories260k"
	tensors   map[string]entry
	maps      []*mapping
	gguf      map[string]any
	tokenizer [3][]byte // tokenizer.json, tokenizer_config.json, chat_template.jinja
}

// Open reads the model that ref names: "" or "stories260k" is the embedded
// one, "hf:OWNER/NAME" or "hf:OWNER/NAME@REVISION" a hub repository, a path
// ending in ".gguf" a GGUF file, and any other path a directory in Hugging
// Face layout. The caller closes the model.
func Open(ctx context.Context, ref string, opts Options) (*Model, error) {
	opts = opts.withDefaults()
	m, err := open(ctx, ref, opts)
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	for _, what := range m.Generation.Ignored {
		opts.Log.Warn("generation_config.json: a value out of range is ignored", "model", m.Name, "key", what)
	}
	if err := m.fingerprint(ctx, opts); err != nil {
		_ = m.Close() // err is the reason
		return nil, fmt.Errorf("open model: %w", err)
	}
	return m, nil
}

func open(ctx context.Context, ref string, opts Options) (*Model, error) {
	switch {
	case ref == "" || ref == EmbeddedName:
		return openEmbedded()
	case strings.HasPrefix(ref, "hf:"):
		repo, err := parseRepo(ref)
		if err != nil {
			return nil, err
		}
		dir, err := repo.snapshot(ctx, opts)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", ref, err)
		}
		return openDir(dir)
	case strings.EqualFold(filepath.Ext(ref), ".gguf"):
		return openGGUF(ref)
	}
	st, err := os.Stat(ref)
	if os.IsNotExist(err) && repoRef.MatchString(ref) {
		return nil, fmt.Errorf("%w (for the hub's repository of that name write hf:%s)", err, ref)
	}
	if err != nil {
		return nil, err
	}
	if !st.IsDir() {
		return nil, fmt.Errorf("%s: neither a directory nor a .gguf file", ref)
	}
	return openDir(ref)
}

// Tensor returns the named tensor. Its Data is read-only and valid until
// Close: a window on the mapped file, except that each call dequantises
// quantised GGUF tensors to F32 and copies those whose rows change order.
func (m *Model) Tensor(name string) (kernels.Tensor, bool) {
	e, ok := m.tensors[name]
	if !ok {
		return kernels.Tensor{}, false
	}
	return e.tensor(), true
}

// Names lists the tensors that Config's architecture uses, sorted.
func (m *Model) Names() []string { return slices.Sorted(maps.Keys(m.tensors)) }

// TokenizerFiles returns the contents of tokenizer.json, tokenizer_config.json
// and chat_template.jinja, nil for those that the model lacks. A GGUF model has
// none of them: see GGUFMeta.
func (m *Model) TokenizerFiles() (tokenizerJSON, configJSON, chatTemplate []byte) {
	return m.tokenizer[0], m.tokenizer[1], m.tokenizer[2]
}

// GGUFMeta returns the metadata of a GGUF file whose keys begin with
// "tokenizer."; nil for other models. Values are string, bool, uint8 to int64,
// float32, float64, []string, []int32, []uint32, []float32, and []any for
// arrays of anything else. The caller must not change it.
func (m *Model) GGUFMeta() map[string]any { return m.gguf }

// Close unmaps the weights: Data of every Tensor is invalid from here on.
func (m *Model) Close() error {
	var errs []error
	for _, mp := range m.maps {
		errs = append(errs, mp.close())
	}
	m.maps, m.tensors = nil, nil
	return errors.Join(errs...)
}
