package model

import (
	"embed"
	"fmt"
	"io/fs"
)

//go:embed stories260k/config.json stories260k/model.safetensors stories260k/tokenizer.json stories260k/tokenizer_config.json
var embedded embed.FS

func openEmbedded() (*Model, error) {
	sub, err := fs.Sub(embedded, EmbeddedName)
	if err != nil {
		return nil, fmt.Errorf("embedded %s: %w", EmbeddedName, err)
	}
	m, err := openFolder(folder{fs: sub})
	if err != nil {
		return nil, fmt.Errorf("embedded %s: %w", EmbeddedName, err)
	}
	m.Name = EmbeddedName
	return m, nil
}
