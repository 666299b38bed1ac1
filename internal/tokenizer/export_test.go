package tokenizer

// IsSpecial reports whether id is a control token, which Decode can skip.
func (t *Tokenizer) IsSpecial(id int32) bool { return t.has(id, flagSpecial) }
