package trust

// MaxTokens is maxTokens.
const MaxTokens = maxTokens

// Kept is how many tokens are kept.
func (t *Tokens) Kept() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.made)
}
