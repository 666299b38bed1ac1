// Tinymodels writes the models of modeltest.Goldens, each into a folder of its own, with the
// prompt that a reference implementation is to compute: prompt.json, its token ids.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/xpyd/xpyd/internal/model/modeltest"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: tinymodels FOLDER")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "tinymodels:", err)
		os.Exit(1)
	}
}

func write(folder string) error {
	for _, g := range modeltest.Goldens() {
		prompt, err := json.Marshal(modeltest.GoldenPrompt(g.Config.Vocab))
		if err != nil {
			return err
		}
		opt := modeltest.HFOptions{Seed: g.Seed, Files: map[string][]byte{"prompt.json": prompt}}
		if err := modeltest.WriteHF(filepath.Join(folder, g.Name), g.Config, opt); err != nil {
			return err
		}
	}
	return nil
}
